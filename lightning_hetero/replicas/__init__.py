"""A replica's values as flat vectors, and states of its optimizers."""
