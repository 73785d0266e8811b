"""``lightning-hetero doctor``: measures the machines, and suggests what to train with."""
