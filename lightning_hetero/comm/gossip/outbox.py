"""Shared memory into which peers of one host write their values, instead of sending them."""

from collections.abc import Mapping

from lightning_hetero.comm.mapped import Mapped
from lightning_hetero.errors import DisagreementError


def others_boxes(own: Mapped, paths: Mapping[int, str]) -> dict[int, Mapped]:
    """The outboxes of other peers of this host.

    Raises:
        DisagreementError: one cannot be opened, or holds another model.
    """
    boxes = {}
    for peer, path in paths.items():
        try:
            boxes[peer] = Mapped(own.vectors, path)
        except (OSError, ValueError) as error:
            raise DisagreementError(
                f"replica {peer}'s values cannot be read in shared memory: {error}. It has another model, or lives "
                "elsewhere under the same host name: give hosts, or containers, names of their own."
            ) from error
    return boxes
