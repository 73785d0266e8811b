"""Strategies of this package under Ray Train, which starts the workers, and starts them again after a failure.

python examples/ray/train_digits.py --workers 2
python examples/ray/train_digits.py --workers 2 --strategy hetero_diloco --folder /shared/run-7 --failures 3
"""

import argparse
import os
import tempfile

import ray.train
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_hetero import DiLoCoStrategy, EmulatedSpeed, HeteroDDPStrategy, HeteroMonitor
from lightning_hetero.callbacks.resumable import ResumableCheckpoint


# `prepare_trainer` wants a RayDDPStrategy, which knows the device of this worker. All else is the first one's.
class RayHeteroDDP(HeteroDDPStrategy, RayDDPStrategy):
    pass


class RayDiLoCo(DiLoCoStrategy, RayDDPStrategy):
    pass


STRATEGIES = {"hetero_ddp": RayHeteroDDP, "hetero_diloco": RayDiLoCo}


class DigitReader(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.accuracy(self.layers(images), labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def train(options):
    """Train, on one worker."""
    seed_everything(1)
    torch.set_num_threads(1)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    training, test = random_split(data, [0.8, 0.2])

    monitor = HeteroMonitor()
    callbacks = [monitor, ResumableCheckpoint(options["folder"], every_n_steps=20)]
    if options["emulate"]:  # the last worker takes four times as long for a sample
        callbacks.append(EmulatedSpeed([(0.005, 0.0005)] * (options["workers"] - 1) + [(0.005, 0.002)]))
    trainer = prepare_trainer(
        Trainer(
            strategy=STRATEGIES[options["strategy"]](),
            plugins=[RayLightningEnvironment()],
            accelerator="auto",
            devices="auto",
            max_epochs=options["epochs"],
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    )
    model = DigitReader()
    trainer.fit(model, DataLoader(training, batch_size=16, shuffle=True))
    [metrics] = trainer.test(model, DataLoader(test, batch_size=32), verbose=False)
    told = {"accuracy": metrics["accuracy"], "ranks": trainer.world_size, "steps": trainer.global_step}
    told["shares"] = list(monitor.history[-1].shares) if monitor.history else []
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(os.path.join(folder, "model.ckpt"))  # all ranks together; the first one writes
        own = ray.train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None
        ray.train.report(told, checkpoint=own)  # Ray keeps metrics only together with a checkpoint


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="ranks, which Ray places on its nodes (%(default)s)")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--strategy", choices=STRATEGIES, default="hetero_ddp", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the data (%(default)s)")
    parser.add_argument("--folder", help="for checkpoints, seen by all nodes; with several nodes it must be given")
    parser.add_argument(
        "--failures", type=int, default=0, help="how often Ray may start all workers again (%(default)s)"
    )
    parser.add_argument("--emulate", action="store_true", help="make the last worker slow, to see shares move")
    options = parser.parse_args()

    own = {
        "workers": options.workers,
        "strategy": options.strategy,
        "epochs": options.epochs,
        "emulate": options.emulate,
    }
    with tempfile.TemporaryDirectory() as beside:
        folder = os.path.abspath(options.folder or os.path.join(beside, "checkpoints"))
        trainer = TorchTrainer(
            train,
            train_loop_config={**own, "folder": folder},
            scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
            torch_config=TorchConfig(backend="gloo"),  # serves all devices; groups of GPUs use NCCL by themselves
            run_config=RunConfig(
                name="hetero",
                storage_path=os.path.join(folder, "ray"),
                failure_config=FailureConfig(max_failures=options.failures),
            ),
        )
        result = trainer.fit()
    metrics = result.metrics
    print(f"{metrics['ranks']} ranks took {metrics['steps']} steps; samples per step: {metrics['shares']}")
    print(f"test accuracy: {metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
