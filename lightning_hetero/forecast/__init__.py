"""Predicts what each strategy makes of a cluster, from few numbers: pure arithmetic, one place for all who need it."""
