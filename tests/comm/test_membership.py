"""How members agree on who takes part: in threads."""

import time

from members import Threads, in_threads, until

from lightning_hetero.comm.membership import Agreed


def die(threads: Threads, member: int) -> float:
    """As the kernel would let it; returns the time."""
    threads.all[member].close()
    return time.time()


def noticed(threads: Threads, member: int) -> float:
    return next(event.time for event in threads.all[member].events if event.what == "changing")


def test_all_agree_on_those_that_remain() -> None:
    with in_threads([[0], [1], [2], [3]]) as threads:
        died = die(threads, 2)
        until(lambda: all(threads.all[one].changing for one in (0, 1, 3)))
        results = threads.agree([0, 1, 3])
        for result in results.values():
            assert isinstance(result, Agreed), result
            assert result.number == 1
            assert result.members == (0, 1, 3)
            assert result.standings == {0: (0, 0), 1: (1, 10), 3: (3, 30)}
            assert result.lost == {2: "has ended without a word: killed, out of memory, or its program is over"}
            assert result.host == 0
        assert len({str(result.offer) for result in results.values()}) == 1
        assert not any(threads.all[one].changing for one in (0, 1, 3))
        assert {one: called > 0 for one, called in threads.called.items()} == {0: True, 1: True, 2: False, 3: True}
        assert noticed(threads, 3) - died < 1.0
