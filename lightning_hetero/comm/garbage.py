"""Keeps Python's garbage collector from looking at everything while all ranks wait.

It looks at some 400,000 objects once PyTorch and Lightning are imported: a quarter of a second, or more where processes
share cores. All ranks collect garbage when others join, so that the connections of the former ranks end.
"""

import gc

_left_out = False


def leave_out() -> None:
    """From now on let the collector look only at what is made later."""
    global _left_out
    if not _left_out and gc.get_freeze_count() == 0:  # else the user decides; counting takes as long as a look
        _left_out = True
        gc.collect()
        gc.freeze()


def take_in_all() -> None:
    """Let the collector look at everything again, if :func:`leave_out` was called; idempotent."""
    global _left_out
    if _left_out:
        _left_out = False
        gc.unfreeze()
