"""Tells peers where they can reach each other."""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from lightning_hetero.comm.gossip.message import TOKEN_BYTES
from lightning_hetero.comm.gossip.pairing import Pairing
from lightning_hetero.comm.gossip.peers import HostPort, Session
from lightning_hetero.comm.gossip.pushing import Pushing
from lightning_hetero.comm.links import ReplicaLinks
from lightning_hetero.errors import ConfigurationError, DisagreementError, HeteroError

T = TypeVar("T", Pairing, Pushing)


class Endpoint(NamedTuple):
    """Where a peer can be reached.

    Attributes:
        interface: address to listen on, of the network between the peers.
        host: name of the machine. Peers with the same one can share memory.
        deadline: seconds within which a message must be answered.
    """

    interface: str
    host: str
    deadline: float


def introduce(
    kind: Callable[[int, Session, str, Sequence[Tensor]], T],
    endpoint: Endpoint,
    links: ReplicaLinks,
    like: Sequence[Tensor],
) -> T | None:
    """Let the leaders of all replicas know where to reach each other (collective over all ranks).

    Args:
        kind: class of the transport.
        endpoint: this rank's.
        links: of this replica. The number of the replica is that of the peer.
        like: vectors of the sizes and dtypes to come, on the CPU.

    Returns:
        The transport on leaders, ``None`` elsewhere.

    Raises:
        HeteroError: on every rank: some peers cannot be reached, or have another model.
    """
    token = links.gather(secrets.token_bytes(TOKEN_BYTES))[0]
    mine = kind(links.index, Session(token, 1, endpoint.deadline), endpoint.interface, like) if links.leads else None
    card = None if mine is None else (links.index, mine.peers.address, endpoint.host, mine.outbox.path)
    cards = [card for card in links.gather(card) if card is not None]
    problem = _unreachable([(host, address) for _, address, host, _ in cards])
    if mine is not None and problem is None:
        mine.peers.know({peer: address for peer, address, *_ in cards})
        try:
            mine.know_boxes(
                {peer: path for peer, _, host, path in cards if host == endpoint.host and peer != links.index}
            )
        except HeteroError as error:
            problem = error
    problems = links.gather(None if problem is None else str(problem))  # all have opened what they need
    if mine is not None:
        mine.outbox.hide()
    if any(problems):
        if mine is not None:
            mine.close()
        raise problem or DisagreementError(next(text for text in problems if text))
    return mine


def _unreachable(places: Sequence[tuple[str, HostPort]]) -> HeteroError | None:
    """Why peers of several hosts could not reach each other; ``None``: no reason is known."""
    inner = [f"{host} ({address[0]})" for host, address in places if address[0].startswith("127.")]
    if len({host for host, _ in places}) == 1 or not inner:
        return None
    return ConfigurationError(
        f"peers on {', '.join(inner)} would listen where other hosts cannot reach them: the job's main address is "
        "their loopback. Give MASTER_ADDR as an IP address of the network between the hosts."
    )
