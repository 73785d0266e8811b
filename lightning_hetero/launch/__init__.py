"""Launching of processes: ragged nodes, ranks that are watched, scripts that are run unchanged."""

import lightning.pytorch  # noqa: F401  before any module here, as it triggers the registration, which uses them
