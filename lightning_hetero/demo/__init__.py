"""Lightning's ``ddp`` and ``hetero_ddp`` side by side, on devices of unequal speed that one machine emulates."""
