"""Gradients on their way between the ranks of a replica: in few bits, or as matrices of low rank."""

from lightning_hetero.comm.gradients.spelling import GRADIENT_WIRES, check_gradient_wire
from lightning_hetero.comm.gradients.wire import GradientWire

__all__ = ["GRADIENT_WIRES", "GradientWire", "check_gradient_wire"]
