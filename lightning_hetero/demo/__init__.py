"""``ddp``, ``hetero_ddp`` and ``hetero_daso`` side by side, on devices of unequal speed that one machine emulates."""
