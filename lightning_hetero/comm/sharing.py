"""Chooses whether long vectors go through shared memory, or over sockets."""

import os
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.comm.same_host import PART, SHARED, share_memory
from lightning_hetero.comm.shared_group import ROW, SharedGroup
from lightning_hetero.errors import UnsupportedError

Within = Literal["auto", "shm", "gloo"]


class Sharing:
    """Lets ranks of one node exchange long vectors through memory that they share.

    Args:
        nodes: where each rank lives; equal values for ranks of one node.
        limit: longest wait for another rank.
        way: ``"auto"``: where it is possible; ``"shm"``: the same, but an error where memory cannot be shared;
            ``"gloo"``: never.
    """

    def __init__(self, nodes: Sequence[Hashable], limit: timedelta, way: Within) -> None:
        self._nodes, self._limit, self._way = nodes, limit, way
        self._said = False

    def group(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> SharedGroup | None:
        """The same ranks as a group that shares memory; ``None`` if they cannot, or should not (collective over them).

        Args:
            group: over gloo.
            ranks: its members.

        Raises:
            UnsupportedError: the ranks are of one node and asked for shared memory, and it cannot be.
            CommunicationError: another rank did not take part in time.
        """
        if self._way == "gloo" or len({self._nodes[rank] for rank in ranks}) > 1 or not os.path.isdir(SHARED):
            return None
        try:
            part = PART if self._way == "auto" else 1.0
            return SharedGroup(share_memory(group, ROW, self._limit, part), group)
        except OSError as error:
            size = ROW * (len(ranks) + 1)
            if self._way == "shm":
                raise UnsupportedError(
                    f"within='shm', but the memory cannot be shared ({error}). Exchanges of ranks {list(ranks)} need "
                    f"{size} bytes in {SHARED} (docker run --shm-size). Set within='auto', which uses sockets then."
                ) from error
            if not self._said:
                self._said = True
                rank_zero_warn(
                    f"Ranks {list(ranks)} exchange over sockets: the memory cannot be shared ({error}). Shared memory "
                    f"is faster, and needs {round(size / PART)} free bytes in {SHARED} (docker run --shm-size), half "
                    "of which it leaves. within='gloo' silences this warning."
                )
            return None
