"""Checkpoints: format, shards, writing, and the newest one that is whole."""
