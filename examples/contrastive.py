r"""Learn what handwritten digits look like, without labels, with a loss that compares the samples of all ranks.

As in SimCLR each image is distorted twice, and the two views of an image must find each other among the views of all
images of the global batch. Ranks of unequal speed have uneven parts of it, so each gathers the others' views with
`self.all_gather(..., sync_grads=True)`. Two minutes on two processor cores::

    python examples/contrastive.py --out contrastive

Two other trainings show what that is worth: one process with the same global batches, by a plain loop, comes to the
same losses; and ranks that compare their own samples only have fewer of them to tell apart. A linear classifier,
trained on a few labelled images, says how good the features are.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from matplotlib.figure import Figure
from mnist import images
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import EmulatedSpeed, HeteroDDPStrategy

LABELLED, TEST = 100, 1000  # images with labels for the classifier, and images to test it on
QUIET = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}


def distort(pictures, draws):
    """Turn, stretch, shear and shift each picture by as much as its six random numbers say."""
    identity = torch.eye(2, 3, dtype=draws.dtype)
    grid = nn.functional.affine_grid(identity + 0.3 * draws.view(-1, 2, 3), pictures.shape, align_corners=False)
    return nn.functional.grid_sample(pictures, grid, align_corners=False)


def contrast(own, numbers, everyone, all_numbers):
    """The NT-Xent loss of this rank's views, of shape (samples, 2, features), among those of all.

    The numbers of the samples in the dataset say which of the others are theirs.
    """
    same = (numbers[:, None] == all_numbers).repeat_interleave(2, 0).repeat_interleave(2, 1)
    view, all_views = (torch.arange(2).repeat(len(part)) for part in (numbers, all_numbers))
    itself = same & (view[:, None] == all_views)
    similar = own.flatten(0, 1) @ everyone.flatten(0, 1).T / 0.2
    return nn.functional.cross_entropy(similar.masked_fill(itself, -torch.inf), (same & ~itself).int().argmax(1))


class Contrast(LightningModule):
    """Keeps the loss and the samples of each global batch, of all ranks."""

    def __init__(self, samples, gathers):
        super().__init__()
        seed_everything(1, verbose=False)
        self.samples, self.gathers = samples, gathers
        self.encoder = nn.Sequential(  # without BatchNorm, which would make a sample's features depend on its rank
            nn.Conv2d(1, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 64),
        )  # fmt: skip
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))
        self.double()  # so that the comparison with one process shows rounding only, however long the training
        self.losses, self.batches, self.shares = [], [], []

    def views(self, pictures, numbers, epoch):
        """Two views of each picture; the same ones whichever rank it is on."""
        draws = torch.rand(self.samples, 2, 6, generator=torch.Generator().manual_seed(epoch)).double() * 2 - 1
        pairs = [self.head(self.encoder(distort(pictures, draws[numbers, view]))) for view in range(2)]
        return nn.functional.normalize(torch.stack(pairs, 1), dim=2)

    def training_step(self, batch, batch_idx):
        pictures, numbers = batch
        own = self.views(pictures, numbers, self.current_epoch)
        all_numbers = self.all_gather(numbers).flatten()
        if self.gathers:
            everyone = self.all_gather(own, sync_grads=True).flatten(0, 1)
            loss = contrast(own, numbers, everyone, all_numbers)
        else:
            loss = contrast(own, numbers, own, numbers)
        self.log("loss", loss, sync_dist=True)  # the mean over the samples of all ranks
        self.shares.append(self.all_gather(torch.tensor(len(numbers))).flatten().tolist())
        self.batches.append((self.current_epoch, all_numbers))
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(self.trainer.callback_metrics["loss"].item())
        if self.global_step % 20 == 0 and self.global_rank == 0:
            print(
                f"  step {self.global_step}: loss {self.losses[-1]:.3f}, images per rank {self.shares[-1]}", flush=True
            )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def on_ranks(options, pictures, gathers):
    model = Contrast(len(pictures), gathers)
    trainer = Trainer(
        strategy=HeteroDDPStrategy(balance=options.shares or "auto"),
        accelerator="cpu",
        devices=len(options.seconds),
        max_epochs=options.epochs,
        callbacks=[EmulatedSpeed([(0.01, seconds) for seconds in options.seconds])],
        **QUIET,
    )
    if trainer.is_global_zero:
        print("each rank compares", "the samples of all ranks" if gathers else "its own samples only", flush=True)
    dataset = TensorDataset(pictures, torch.arange(len(pictures)))
    trainer.fit(model, DataLoader(dataset, options.batch_size, shuffle=True, drop_last=True))
    return model, trainer.is_global_zero


def in_one_process(pictures, batches):
    """The same training by a plain loop, without any strategy."""
    model = Contrast(len(pictures), gathers=False)
    optimizer = model.configure_optimizers()
    for epoch, numbers in batches:
        views = model.views(pictures[numbers], numbers, epoch)
        loss = contrast(views, numbers, views, numbers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.losses.append(loss.item())
    return model


@torch.no_grad()
def probe(encoder, pictures, labels):
    """The accuracy of a linear classifier on the features, trained on a few images."""
    features = encoder(pictures).numpy()
    features = features / np.linalg.norm(features, axis=1, keepdims=True)
    known, test = slice(TEST, TEST + LABELLED), slice(0, TEST)
    classifier = LogisticRegression(C=100, max_iter=1000).fit(features[known], labels[known])
    return classifier.score(features[test], labels[test])


def draw(losses, accuracies, path):
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    looks = {"color": "#BBBBBB", "linewidth": 5}, {"color": "#D81B78", "linewidth": 1.2}, {"color": "#0072B2"}
    for (name, values), look in zip(losses.items(), looks, strict=True):
        left.plot(range(1, len(values) + 1), values, label=name, **look)
    left.set_xlabel("step")
    left.set_ylabel("contrastive loss, nats")
    left.legend(frameon=False)
    for row, (name, accuracy) in enumerate(accuracies.items()):
        right.barh(row, 100 * accuracy, color="#BBBBBB")
        right.text(2, row, f"{name}: {accuracy:.1%}", va="center")
    right.set_yticks([])
    right.invert_yaxis()
    right.set_xlim(0, 100)
    right.set_xlabel(f"accuracy of a linear classifier, %\n({LABELLED} labelled images)")
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = {"type": int, "metavar": "N"}
    seconds = {"type": float, "nargs": "+", "metavar": "X", "default": [0.004, 0.004, 0.016]}
    parser.add_argument("--seconds", **seconds, help="for an image, of each rank; 0: as fast as it is (%(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", metavar="X", help="of the ranks (default: by their speed)")
    parser.add_argument("--images", **whole, default=3000, help="to train on, without labels (%(default)s)")
    parser.add_argument("--batch-size", **whole, default=32, help="images per rank and step, on average (%(default)s)")
    parser.add_argument("--epochs", **whole, default=4, help="passes over the images (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("contrastive"), help="folder for results (%(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)  # ranks share this machine's cores
    pictures, labels = images(*range(10))
    pictures = pictures.double()
    unlabelled = pictures[TEST : TEST + options.images]
    gathered, first = on_ranks(options, unlabelled, gathers=True)
    alone, _ = on_ranks(options, unlabelled, gathers=False)
    if not first:
        return
    print("one process, the same global batches", flush=True)
    single = in_one_process(unlabelled, gathered.batches)
    models = {"samples of all ranks": gathered, "one process": single, "own samples only": alone}
    accuracies = {"untrained": probe(Contrast(1, False).encoder, pictures, labels)}
    accuracies.update({name: probe(model.encoder, pictures, labels) for name, model in models.items()})
    losses = {name: model.losses for name, model in models.items()}
    difference = max(abs(a - b) for a, b in zip(gathered.losses, single.losses, strict=True))
    print(f"\n{'compared':22}{'first loss':>11}{'last loss':>11}{'linear classifier':>19}")
    for name, values in losses.items():
        print(f"{name:22}{values[0]:11.4f}{values[-1]:11.4f}{accuracies[name]:19.1%}")
    print(f"{'untrained':44}{accuracies['untrained']:19.1%}")
    print(f"images per rank in the last step: {gathered.shares[-1]}")
    print(f"samples of all ranks and one process: losses differ by {difference:.1e} at most")
    options.out.mkdir(parents=True, exist_ok=True)
    batches = [numbers.tolist() for _, numbers in gathered.batches]
    results = {"losses": losses, "accuracies": accuracies, "batches": batches, "shares": gathered.shares}
    (options.out / "results.json").write_text(json.dumps(results))
    draw(losses, accuracies, options.out / "contrastive.png")
    print(f"figure: {options.out / 'contrastive.png'}")


if __name__ == "__main__":
    main()
