import os

# Before torch is imported anywhere: ranks share this machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
