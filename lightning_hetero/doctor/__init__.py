"""``lightning-hetero doctor``: what there is to train on, measured, and what to train with."""
