r"""Train a network on the digits 0 to 4, then finetune it to read 5 to 9, on devices of unequal speed.

Real images, BatchNorm, and two of Lightning's callbacks that change the training on the way: `BackboneFinetuning`
trains the new head alone at first and unfreezes the backbone after some epochs, `StochasticWeightAveraging` averages
the weights of the last ones. The same finetuning runs under several strategies, on emulated devices. Two minutes on two
processor cores::

    python examples/finetune_digits.py --out finetune
    python examples/finetune_digits.py --strategies ddp hetero_ddp hetero_daso --out finetune
"""

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, StochasticWeightAveraging
from matplotlib.figure import Figure
from mnist import images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import lightning_hetero

STRATEGIES = {
    "ddp": lambda: "ddp",
    "hetero_ddp": lightning_hetero.HeteroDDPStrategy,
    "hetero_node": lambda: lightning_hetero.NodeAverageStrategy(every_n_steps=4, ranks_per_node=1),
    "hetero_daso": lambda: lightning_hetero.DASOStrategy(ranks_per_node=1, warmup=1, cooldown=1),
}
COLOURS = dict(zip(STRATEGIES, ("#888888", "#0072B2", "#D81B78", "#3FA34D"), strict=True))


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)
    )


class DigitReader(LightningModule):
    """Reads five digits, from `first` on."""

    def __init__(self, first, lr, backbone=None):
        super().__init__()
        self.first, self.lr = first, lr
        self.backbone = backbone or nn.Sequential(block(1, 8), block(8, 16), block(16, 32), nn.Flatten())
        self.head = nn.Linear(32 * 3 * 3, 5)
        self.accuracy = MulticlassAccuracy(5, average="micro")

    def forward(self, pictures):
        return self.head(self.backbone(pictures))

    def training_step(self, batch, batch_idx):
        pictures, digits = batch
        return nn.functional.cross_entropy(self(pictures), digits - self.first)

    def validation_step(self, batch, batch_idx):
        pictures, digits = batch
        self.accuracy(self(pictures), digits - self.first)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trainable, lr=self.lr, momentum=0.9)


class Watch(Callback):
    """After each epoch: the accuracy, the seconds of training so far, how far the backbone's filters have moved."""

    def __init__(self):
        self.rows, self.seconds = [], 0.0

    def on_train_start(self, trainer, pl_module):
        self.before = pl_module.backbone[0][0].weight.detach().clone()

    def on_train_epoch_start(self, trainer, pl_module):
        self.began = time.perf_counter()

    def on_validation_epoch_start(self, trainer, pl_module):
        self.seconds += time.perf_counter() - self.began
        self.moved = (pl_module.backbone[0][0].weight - self.before).norm().item()

    def on_validation_epoch_end(self, trainer, pl_module):
        accuracy, epoch = trainer.callback_metrics["accuracy"].item(), trainer.current_epoch
        self.rows.append({"epoch": epoch, "accuracy": accuracy, "seconds": self.seconds, "moved": self.moved})
        if trainer.is_global_zero:
            print(f"  epoch {epoch}: accuracy {accuracy:.1%}, backbone moved by {self.moved:.3f}", flush=True)


def fit(options, strategy, model, digits, epochs, *callbacks):
    """Train on four fifths of the images of these digits, and validate on the others."""
    seed_everything(2, verbose=False)
    pictures, labels = (part[: options.images] for part in images(*digits))
    test = len(labels) // 5
    loaders = [
        DataLoader(TensorDataset(pictures[part], labels[part]), options.batch_size, shuffle=part.stop is None)
        for part in (slice(test, None), slice(0, test))
    ]
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=len(options.seconds),
        max_epochs=epochs,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, *loaders)
    return trainer.is_global_zero


def finetune(options, name, backbone):
    watch, shares = Watch(), lightning_hetero.HeteroMonitor(report=None)
    model = DigitReader(5, 0.05, copy.deepcopy(backbone))
    callbacks = [
        BackboneFinetuning(unfreeze_backbone_at_epoch=options.unfreeze, backbone_initial_ratio_lr=0.2),
        StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=options.average, annealing_epochs=1),
        watch,
        lightning_hetero.EmulatedSpeed([(0.010, seconds) for seconds in options.seconds]),
        ModelCheckpoint(options.out / name, "{epoch}", save_top_k=-1),
        *([shares] if name != "ddp" else []),
    ]
    first = fit(options, STRATEGIES[name](), model, range(5, 10), options.epochs, *callbacks)
    even = (options.batch_size,) * len(options.seconds)
    return first, watch.rows, shares.history[-1].shares if shares.history else even


def draw(results, options, path):
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for name, (rows, _) in results.items():
        epochs, accuracies = zip(*((row["epoch"] + 1, 100 * row["accuracy"]) for row in rows), strict=True)
        left.plot(epochs, accuracies, "o-", color=COLOURS[name], label=name)
    for epoch, label in (
        (options.unfreeze, "the backbone\nis unfrozen"),
        (options.average - 1, "weights are\naveraged"),
    ):
        left.axvline(epoch + 0.5, color="#222222", linestyle=":")
        left.text(epoch + 0.6, 0.03, label, transform=left.get_xaxis_transform())
    left.set_xlabel("epoch (the last one measures BatchNorm's statistics of the average)")
    left.set_ylabel("accuracy on the digits 5 to 9, %")
    left.legend(frameon=False, loc="center right")
    base = results[next(iter(results))][0][-1]["seconds"]
    for row, (name, (rows, shares)) in enumerate(results.items()):
        right.barh(row, rows[-1]["seconds"] / base, color=COLOURS[name], alpha=0.5)
        right.text(0.02, row, f"{name}: {' + '.join(map(str, shares))} images per step", va="center")
    right.set_yticks([])
    right.invert_yaxis()
    right.set_xlabel(f"time of all epochs, {next(iter(results))} = 1")
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = {"type": int, "metavar": "N"}
    seconds = {"type": float, "nargs": "+", "metavar": "X", "default": [0.002, 0.002, 0.008]}
    parser.add_argument("--seconds", **seconds, help="for an image, of each rank; 0: as fast as it is (%(default)s)")
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=STRATEGIES,
        default=["ddp", "hetero_ddp", "hetero_node"],
        help="(%(default)s)",
    )
    parser.add_argument("--images", **whole, default=2500, help="of each half of the digits (%(default)s)")
    parser.add_argument("--batch-size", **whole, default=32, help="images per rank and step, on average (%(default)s)")
    parser.add_argument("--epochs", **whole, default=8, help="passes over the data to finetune (%(default)s)")
    parser.add_argument("--unfreeze", **whole, default=3, help="epochs with a frozen backbone (%(default)s)")
    parser.add_argument("--average", **whole, default=6, help="average weights from this epoch on (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("finetune"), help="folder for what it writes (%(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)  # ranks share this machine's cores
    seed_everything(1, verbose=False)
    pretrained = DigitReader(0, 0.05)
    if fit(options, "hetero_ddp", pretrained, range(5), 3):
        print("trained on the digits 0 to 4; now 5 to 9:", flush=True)
    results = {}
    for name in options.strategies:
        first, rows, shares = finetune(options, name, pretrained.backbone)
        results[name] = rows, shares
        if first:
            print(f"that was {name}", flush=True)
    if not first:
        return
    base = results[options.strategies[0]][0][-1]["seconds"]
    print(f"\n{'strategy':14}{'accuracy':>9}{'time':>7}   images per rank and step")
    for name, (rows, shares) in results.items():
        print(f"{name:14}{rows[-1]['accuracy']:9.1%}{rows[-1]['seconds'] / base:7.2f}   {shares}")
    (options.out / "results.json").write_text(json.dumps({name: rows for name, (rows, _) in results.items()}))
    draw(results, options, options.out / "finetune.png")
    print(f"figure: {options.out / 'finetune.png'}")


if __name__ == "__main__":
    main()
