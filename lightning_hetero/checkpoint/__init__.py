"""Checkpoints: format, shards, writing, and the newest one that is whole."""

import lightning.pytorch  # noqa: F401  before any part of this package, as it triggers the registration
