"""Low-bit wires: how few bits stand for many values between replicas.

An :class:`Encoding` turns a vector into bytes, and tells what the bytes leave out. A :class:`Feedback` keeps that, so
that the next message makes up for it.
"""

from lightning_hetero.comm.encodings.encoding import Encoding
from lightning_hetero.comm.encodings.feedback import Feedback
from lightning_hetero.comm.encodings.spelling import LOW_BIT, check_wire, encoding_of, only_wide_wires

__all__ = ["LOW_BIT", "Encoding", "Feedback", "check_wire", "encoding_of", "only_wide_wires"]
