"""Mistakes end in one clear error, on every rank, before training starts where they can be known then."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import attempt
from tasks import FAST, EvaluatedNet, Net, TokenNet, dataset
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import HeteroDDPStrategy, HeteroError
from lightning_hetero.errors import (
    CommunicationError,
    ConfigurationError,
    DataError,
    DisagreementError,
    LaunchError,
    ShareError,
    UnsupportedError,
)


def _train(
    folder: str,
    module: Any = None,
    strategy: dict[str, Any] | None = None,
    loader: Any = None,
    trainer: dict[str, Any] | None = None,
) -> None:
    chosen = HeteroDDPStrategy(**(strategy or {}))
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_on_exception=True)
    options = {**FAST, "max_epochs": 1, "enable_checkpointing": True, "callbacks": [keep], **(trainer or {})}
    data = loader() if callable(loader) else DataLoader(dataset(96), **(loader or {"batch_size": 4}))
    pl.Trainer(strategy=chosen, **options).fit(module() if module else Net(), data)


def refused(
    folder: Path, kind: type[HeteroError], *words: str, world: int = 2, env_of: Any = None, **kwargs: Any
) -> list[str]:
    """See every rank refuse with these words, without waiting for a timeout, and leave no checkpoint."""
    outcomes = attempt(_train, world, str(folder), env_of=env_of, **kwargs)
    assert not any(outcome.late for outcome in outcomes)
    for outcome in outcomes:
        assert isinstance(outcome.error, HeteroError), outcome.trace
        assert isinstance(outcome.error, kind), outcome.trace
        for word in words:
            assert word in str(outcome.error)
    assert not list(folder.iterdir())
    return [str(outcome.error) for outcome in outcomes]


# -- known without other ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"balance": [1.0, -1.0]}, "at least 0"),
        ({"balance": [1.0, float("nan")]}, "finite"),
        ({"balance": [0.0, 0.0]}, "not all 0"),
        ({"balance": "fair"}, "'fair'"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"rebalance_every_n_steps": 0}, "rebalance_every_n_steps=0"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": timedelta(seconds=-1)}, "timeout=-1 s: the longest wait must be above 0"),
        ({"balance": "off", "balance_iterable": True}, "balance='off' fixes them"),
        ({"balance_iterable": 2}, "balance_iterable=2 must be one of True, False"),
        ({"start_method": "x"}, "start_method='x' must be one of 'popen'"),
        ({"process_group_backend": "nccl"}, "All ranks meet over gloo"),
        ({"balance": [1.0, 1.0], "min_batch_size": 9, "max_batch_size": 3}, "min_batch_size=[9, 9]"),
        ({"balance": [1.0, 1.0], "min_batch_size": [1, 2, 3]}, "3 limits for 2 ranks"),
        ({"balance": [1.0, 1.0], "max_batch_size": -1}, "at least 0"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        HeteroDDPStrategy(**options)
    assert words in str(raised.value)
    assert isinstance(raised.value, ValueError)


# -- known once the ranks have met ---------------------------------------------------------------------------


def test_a_wrong_number_of_shares(tmp_path: Path) -> None:
    refused(tmp_path, ConfigurationError, "3 shares for 2 ranks", strategy={"balance": [1.0, 1.0, 1.0]})


def test_limits_that_cannot_be_met(tmp_path: Path) -> None:
    refused(tmp_path, ShareError, "at most [3, 3]", "8 samples", strategy={"max_batch_size": 3})
    refused(tmp_path, ShareError, "8 samples is too small", strategy={"min_batch_size": 5})


def test_a_batch_smaller_than_the_world(tmp_path: Path) -> None:
    refused(tmp_path, ShareError, "1 samples is too small for 2 ranks", strategy={"global_batch_size": 1})


def test_nodes_that_do_not_add_up(tmp_path: Path) -> None:
    refused(tmp_path, ConfigurationError, "does not fit 2 ranks", strategy={"ranks_per_node": 3})


def _tiny() -> DataLoader:
    return DataLoader(dataset(1), batch_size=4)


def test_a_dataset_smaller_than_the_world(tmp_path: Path) -> None:
    refused(tmp_path, DataError, "1 samples for 2 ranks", loader=_tiny)


class Rows(IterableDataset):
    """Batches of strings, of unknown size."""

    def __iter__(self) -> Any:
        yield from ("text" for _ in range(8))


def _sizeless() -> DataLoader:
    return DataLoader(Rows(), batch_size=4)


def test_a_batch_whose_size_cannot_be_told(tmp_path: Path) -> None:
    refused(tmp_path, DataError, "is unknown", "batch_weight", loader=_sizeless)


def _unbatched() -> DataLoader:
    return DataLoader(dataset(96), batch_size=None)


def test_no_batch_size(tmp_path: Path) -> None:
    refused(tmp_path, UnsupportedError, "batch_size=None", "use_distributed_sampler=False", loader=_unbatched)


def _unordered() -> DataLoader:
    return DataLoader(dataset(96), batch_size=4, num_workers=2, in_order=False)


def test_unordered_workers(tmp_path: Path) -> None:
    refused(tmp_path, UnsupportedError, "in_order=True", loader=_unordered)


class TwoLoaders(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch["a"]) + self.loss(batch["b"])


def _incommensurable() -> dict[str, DataLoader]:
    return {"a": DataLoader(dataset(192), batch_size=32), "b": DataLoader(dataset(191), batch_size=32)}


def test_combined_tails_without_a_common_divisor(tmp_path: Path) -> None:
    refused(
        tmp_path,
        DataError,
        "[96, 95]",
        "equal proportions",
        "drop_last",
        world=3,
        module=TwoLoaders,
        loader=_incommensurable,
    )


class FetchesItself(Net):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return self.loss(batch)


def test_fetching_batches_in_training_step(tmp_path: Path) -> None:
    refused(tmp_path, UnsupportedError, "dataloader_iter", module=FetchesItself)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def test_synchronised_batchnorm_on_cpu(tmp_path: Path) -> None:
    refused(tmp_path, UnsupportedError, "sync_batchnorm", "CPU", module=Normed, trainer={"sync_batchnorm": True})


def test_validation_by_the_clock(tmp_path: Path) -> None:
    trainer = {"val_check_interval": "00:00:00:05", "check_val_every_n_epoch": None}
    refused(tmp_path, UnsupportedError, "val_check_interval", "own clock", trainer=trainer)


class BadWeight(TokenNet):
    def batch_weight(self, batch: Any) -> float:
        return -1.0 if self.global_rank == 1 else 1.0


def test_negative_batch_weights(tmp_path: Path) -> None:
    refused(tmp_path, DataError, "batch_weight", "negative or NaN", module=BadWeight)


# -- ranks that differ ---------------------------------------------------------------------------------------


class ByRank(Net):
    """A model whose width depends on the rank."""

    def __init__(self) -> None:
        import os

        super().__init__()
        width = 16 + 4 * int(os.environ["RANK"])
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1)).double()


def test_model_shapes_that_differ(tmp_path: Path) -> None:
    words = ("parameter net.0.weight", "rank 0: (16, 8) float64", "rank 1: (20, 8) float64")
    messages = refused(tmp_path, DisagreementError, *words, module=ByRank)
    assert messages[0] == messages[1]


def _train_by_rank(folder: str) -> None:
    import os

    _train(folder, strategy={"rebalance_every_n_steps": 3 + int(os.environ["RANK"])})


def test_options_that_differ(tmp_path: Path) -> None:
    for outcome in attempt(_train_by_rank, 2, str(tmp_path)):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert "rebalance_every_n_steps: rank 0: 3, rank 1: 4" in str(outcome.error)


def _settings_by_rank(folder: str) -> None:
    import os

    rank = int(os.environ["RANK"])
    _train(folder, trainer={"precision": ["32-true", "bf16-mixed"][rank], "accumulate_grad_batches": 1 + rank})


def test_trainer_settings_that_differ(tmp_path: Path) -> None:
    # As when one rank is on a CPU, where 16-mixed silently becomes bf16-mixed.
    for outcome in attempt(_settings_by_rank, 2, str(tmp_path)):
        assert isinstance(outcome.error, DisagreementError), outcome.trace
        assert "precision: rank 0: 32-true, rank 1: bf16-mixed" in str(outcome.error)
        assert "accumulate_grad_batches: rank 0: 1, rank 1: 2" in str(outcome.error)


def _data_by_rank() -> DataLoader:
    import os

    return DataLoader(dataset(96 + int(os.environ["RANK"])), batch_size=4)


def test_data_that_differs(tmp_path: Path) -> None:
    refused(tmp_path, DisagreementError, "samples: rank 0: 96, rank 1: 97", loader=_data_by_rank)


def test_seeds_that_differ(tmp_path: Path) -> None:
    refused(tmp_path, DisagreementError, "seed_everything", env_of=lambda rank: {"PL_GLOBAL_SEED": str(rank)})


def test_an_unsupported_setting_on_one_rank_only(tmp_path: Path) -> None:
    outcomes = attempt(_train_one_sided, 2, str(tmp_path))
    assert isinstance(outcomes[1].error, UnsupportedError), outcomes[1].trace
    assert isinstance(outcomes[0].error, DisagreementError), outcomes[0].trace
    assert "rank 1" in str(outcomes[0].error)


def _train_one_sided(folder: str) -> None:
    import os

    _train(folder, module=FetchesItself if os.environ["RANK"] == "1" else Net)


# -- launch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_missing_launcher_variables(tmp_path: Path, name: str) -> None:
    refused(tmp_path, LaunchError, name, "torchrun", env_of=lambda rank: {name: ""})


def test_too_few_samples_to_validate(tmp_path: Path) -> None:
    for outcome in attempt(_validate, 3):
        assert isinstance(outcome.error, DataError), outcome.trace
        assert "2 samples for 3 ranks" in str(outcome.error)


def _validate() -> None:
    trainer = pl.Trainer(strategy=HeteroDDPStrategy(), **FAST)
    trainer.validate(EvaluatedNet(), DataLoader(dataset(2), batch_size=4), verbose=False)


# -- a rank that fails while training ------------------------------------------------------------------------


class FailsOnOne(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            raise RuntimeError("a fault of rank 1")
        return super().training_step(batch, batch_idx)


def test_nothing_hangs_when_a_rank_fails() -> None:
    outcomes = attempt(_failing, 3)
    assert not any(outcome.late for outcome in outcomes)
    assert "a fault of rank 1" in str(outcomes[1].error)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, CommunicationError), outcomes[rank].trace
        assert "rank 1 failed with RuntimeError: a fault of rank 1" in str(outcomes[rank].error)


class BreaksBackward(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx).detach()


def test_an_error_in_backward_is_not_taken_for_a_lost_rank(tmp_path: Path) -> None:
    for outcome in attempt(_train, 2, str(tmp_path), module=BreaksBackward):
        assert type(outcome.error) is RuntimeError, outcome.trace
        assert "does not require grad" in str(outcome.error)


class Stalls(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_rank == 1 and batch_idx == 2:
            time.sleep(9)
        return super().training_step(batch, batch_idx)


def test_a_rank_that_stalls_ends_the_others_within_the_timeout(tmp_path: Path) -> None:
    outcome = attempt(_train, 2, str(tmp_path), module=Stalls, strategy={"timeout": 4}, trainer={"callbacks": []})[0]
    assert isinstance(outcome.error, CommunicationError), outcome.trace
    assert "timeout" in str(outcome.error)


def _failing() -> None:
    pl.Trainer(strategy=HeteroDDPStrategy(), **{**FAST, "max_epochs": 1}).fit(
        FailsOnOne(), DataLoader(dataset(96), batch_size=4)
    )
