"""What people look at, and what lets one machine pass for several."""

from lightning_hetero.callbacks.emulation import EmulatedSpeed
from lightning_hetero.callbacks.inline import Summary
from lightning_hetero.callbacks.monitor import HeteroMonitor
from lightning_hetero.callbacks.record import Exchanged, Record
from lightning_hetero.callbacks.resumable import ResumableCheckpoint

__all__ = ["EmulatedSpeed", "Exchanged", "HeteroMonitor", "Record", "ResumableCheckpoint", "Summary"]
