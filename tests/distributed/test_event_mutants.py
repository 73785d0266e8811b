"""Controls for `test_events`: with each of these mistakes the comparison of its event fails."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import test_events as table
import torch
from events import EPOCH, Watch, fit
from growing import LATE, grow
from ranks import attempt


def _patched(owner: Any, name: str, value: Any, function: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        return function(*args)


def _moved(owner: Any, hook: str, when: Callable[[pl.Trainer], bool], function: Callable[..., Any], *args: Any) -> Any:
    """Move the first parameters a little, from a moment on."""
    known, done = getattr(owner, hook, None), []

    def moved(callback: Any, trainer: pl.Trainer, module: pl.LightningModule, *rest: Any) -> None:
        if when(trainer) and not done:
            done.append(True)
            with torch.no_grad():
                next(module.parameters()).add_(1e-9)
        if known:
            known(callback, trainer, module, *rest)

    return _patched(owner, hook, moved, function, *args)


def forgets_momentum(function: Callable[..., Any], *args: Any) -> Any:
    return _patched(torch.optim.SGD, "load_state_dict", lambda *_: None, function, *args)


def begins_elsewhere(function: Callable[..., Any], *args: Any) -> Any:
    return _moved(Watch, "on_train_start", lambda trainer: trainer.global_step > 0, function, *args)


def keeps_what_was_validated(function: Callable[..., Any], *args: Any) -> Any:
    def kept(watch: Watch, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if watch.record.metrics and trainer.global_step % 2 == 0:
            torch.nn.utils.vector_to_parameters(watch.record.validated[-1].clone(), module.parameters())

    return _patched(Watch, "on_train_batch_start", kept, function, *args)


def ignores_what_is_not_finite(function: Callable[..., Any], *args: Any) -> Any:
    def ignoring(*args: Any, options: Any = None, **more: Any) -> Any:
        return fit(*args, options={"on_nan": "ignore"}, **more)

    return _patched(table, "fit", ignoring, function, *args)


def one_that_remains_is_off(function: Callable[..., Any], *args: Any) -> Any:
    def when(trainer: pl.Trainer) -> bool:
        return trainer.world_size == 2 and trainer.global_rank == 0

    return _moved(Watch, "on_train_batch_start", when, function, *args)


def what_is_frozen_moves(function: Callable[..., Any], *args: Any) -> Any:
    def when(trainer: pl.Trainer) -> bool:
        return trainer.global_rank == 1 and trainer.global_step == EPOCH + 2

    return _moved(Watch, "on_train_batch_start", when, function, *args)


def a_stream_begins_anew(function: Callable[..., Any], *args: Any) -> Any:
    return _patched(table.Shard, "load_state_dict", lambda *_: None, function, *args)


def who_joins_is_off(function: Callable[..., Any], *args: Any) -> Any:
    return _moved(Watch, "on_train_start", lambda _: LATE in os.environ, function, *args)


def _resumed(path: Path, name: str, mutant: Any) -> Any:
    return partial(table.check_resumed, name, table.job(partial(mutant, table.resumed), name, path), path)


def _moved_elsewhere(path: Path, name: str, mutant: Any) -> Any:
    file = path / "saved.ckpt"
    before = table.job(table.saved, name, file, nodes=(1, 1, 1))
    after = table.job(partial(mutant, table.moved), name, file, nodes=(1, 1))
    return partial(table.check_moved, name, before, after, file)


def _looked(path: Path, name: str, mutant: Any) -> Any:
    return partial(
        table.check_validation, name, table.job(partial(mutant, table.fit_with_validation), name, path), path
    )


def _broken(path: Path, name: str, mutant: Any) -> Any:
    return partial(table.check_broken, name, table.job(partial(mutant, table.broken), name, path), path)


def _left_out(path: Path, name: str, mutant: Any) -> Any:
    return partial(table.check_left_out, name, table.job(partial(mutant, table.left_out), name))


def _lost(path: Path, name: str, mutant: Any) -> Any:
    outcomes = attempt(partial(mutant, table.lost), 3, name, "before", nodes=[1, 1, 1])
    return partial(table.check_lost, name, "before", outcomes)


def _terminated(path: Path, name: str, mutant: Any) -> Any:
    return partial(table.check_terminated, name, table.job(partial(mutant, table.terminated), name, path), path)


def _changed(path: Path, name: str, mutant: Any) -> Any:
    ranks = table.job(partial(mutant, table.changed), name, table.Freezes, path)
    return partial(table.check_changed, name, table.Freezes, ranks)


def _streamed(path: Path, name: str, mutant: Any) -> Any:
    return partial(table.check_streamed, name, table.job(partial(mutant, table.streamed), name, path))


def _grown(path: Path, name: str, mutant: Any) -> Any:
    ranks = table.rest_of(grow(2, 1, partial(mutant, table.grown), name, path))
    return partial(table.check_grown, name, ranks)


MUTANTS: list[tuple[Any, str, Any]] = [
    (_resumed, "hetero_easgd_async", forgets_momentum),
    (_resumed, "hetero_node", begins_elsewhere),
    (_moved_elsewhere, "hetero_node", forgets_momentum),
    (_looked, "hetero_node", keeps_what_was_validated),
    (_broken, "hetero_ddp", ignores_what_is_not_finite),
    (_left_out, "hetero_ddp", ignores_what_is_not_finite),
    (_lost, "hetero_ddp", one_that_remains_is_off),
    (_terminated, "hetero_node", forgets_momentum),
    (_changed, "hetero_node", what_is_frozen_moves),
    (_streamed, "hetero_node", a_stream_begins_anew),
    (_grown, "hetero_node", who_joins_is_off),
]


@pytest.mark.long(after=2)
@pytest.mark.parametrize(("event", "name", "mutant"), MUTANTS)
def test_a_mistake_is_seen(tmp_path: Path, event: Any, name: str, mutant: Any) -> None:
    check = event(tmp_path, name, mutant)
    with pytest.raises(AssertionError):
        check()
