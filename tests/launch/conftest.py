import sys
from pathlib import Path

# `ranks` and `tasks`, which run functions on several ranks.
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
