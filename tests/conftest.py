import os
import sys
from pathlib import Path

# Before torch is imported anywhere: ranks share this machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `ranks` and `tasks`, which run functions on several ranks, and `scripts`.
sys.path.insert(0, str(Path(__file__).parent / "distributed"))
