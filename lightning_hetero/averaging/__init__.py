"""How replicas agree: the Averager protocol, and one file per algorithm."""
