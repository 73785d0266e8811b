"""How peers come to know each other."""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from lightning_hetero.comm.gossip.message import TOKEN_BYTES
from lightning_hetero.comm.gossip.pairing import Pairing
from lightning_hetero.comm.gossip.peers import Job
from lightning_hetero.comm.gossip.pushing import Pushing
from lightning_hetero.comm.links import ReplicaLinks

T = TypeVar("T", Pairing, Pushing)


class Place(NamedTuple):
    """Where a peer can be reached.

    Attributes:
        interface: address to listen on, of the network between the peers.
        host: machine whose memory its ranks share.
        deadline: seconds within which a message must be answered.
    """

    interface: str
    host: str
    deadline: float


def introduce(
    kind: Callable[[int, Job, str, Sequence[Tensor]], T], place: Place, links: ReplicaLinks, like: Sequence[Tensor]
) -> T | None:
    """Let the leaders of all replicas know where the others are (collective over all ranks).

    Args:
        kind: of transport.
        place: this rank's.
        links: of this replica; its number is the peer's.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Returns:
        The transport, on leaders.
    """
    token = links.gather(secrets.token_bytes(TOKEN_BYTES))[0]
    mine = kind(links.index, Job(token, 1, place.deadline), place.interface, like) if links.leads else None
    card = None if mine is None else (links.index, mine.peers.address, place.host, mine.outbox.path)
    cards = [card for card in links.gather(card) if card is not None]
    if mine is not None:
        mine.peers.know({peer: address for peer, address, *_ in cards})
        mine.know_boxes({peer: path for peer, _, host, path in cards if host == place.host and peer != links.index})
    links.gather(None)  # all have opened what they need
    if mine is not None:
        mine.outbox.hide()
    return mine
