"""Callbacks: the monitor, resumable checkpoints, and emulated speeds."""

from lightning_hetero.callbacks.emulation import EmulatedSpeed
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.callbacks.monitor_data import ExchangeRecord, Record
from lightning_hetero.callbacks.report import Summary
from lightning_hetero.callbacks.resumable import ResumableCheckpoint

__all__ = ["EmulatedSpeed", "ExchangeRecord", "HeteroMonitor", "Record", "ResumableCheckpoint", "Summary"]
