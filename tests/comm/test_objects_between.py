"""Objects of any size between ranks."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run

from lightning_hetero.comm import object_collectives

H = object_collectives.HEAD
SIZES = {
    "short": [0, 10, 100],
    "long": [5 * H, 3 * H, 7 * H],
    "one long": [10, 10, 5 * H],
    "first long": [2 * H + 1, 0, 10],
    "around the head": [H - 60, H, H + 60],
}


def _content(rank: int, size: int) -> bytes:
    return bytes((rank + i) % 251 for i in range(size))


def exchanged() -> dict[str, Any]:
    """Results of each kind of gathering on this rank, by case."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, found = dist.get_rank(), dict[str, Any]()
    rest = dist.new_group([1, 2])
    for case, sizes in SIZES.items():
        own = _content(rank, sizes[rank])
        found[case] = {
            "all": object_collectives.all_gather(own),
            "first": object_collectives.gather(own),
            "group": object_collectives.all_gather(own, rest) if rank else None,
        }
    # The first message that is longer than its head, and the last that is not, by their size as it travels.
    own = next(
        _content(rank, n) for n in range(H) if len(object_collectives.pack_value(_content(rank, n))) == H + (rank > 0)
    )
    found["to the byte"] = {
        "all": [len(object_collectives.pack_value(one)) for one in object_collectives.all_gather(own)]
    }
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def results() -> list[Any]:
    return run(exchanged, 3)


@pytest.mark.parametrize("case", SIZES)
def test_every_rank_gets_what_each_has_sent(results: list[Any], case: str) -> None:
    everyone = [_content(rank, size) for rank, size in enumerate(SIZES[case])]
    for rank, result in enumerate(results):
        assert result[case]["all"] == everyone
        assert result[case]["first"] == (None if rank else everyone)
        assert result[case]["group"] == (everyone[1:] if rank else None)


def test_the_head_ends_where_the_rest_begins(results: list[Any]) -> None:
    for result in results:
        assert result["to the byte"]["all"] == [H, H + 1, H + 1]
