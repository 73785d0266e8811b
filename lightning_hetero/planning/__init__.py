"""The arithmetic of cost: a cluster, predictions, and the choice of a strategy."""
