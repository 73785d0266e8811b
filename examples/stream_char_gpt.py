r"""Train the small GPT of `daso_char_gpt.py` on a stream of text, stop in the middle of an epoch, and go on there.

Ranks of unequal speed read the source code of Python, file by file. The same training runs twice: straight through, and
stopped halfway, then resumed from its checkpoint by a new Trainer. Two minutes on two processor cores::

    python examples/stream_char_gpt.py --out stream

There are two ways to read a stream::

    --loader shared     all ranks read the same stream, a `SharedStream`, and take samples by their speed (the default)
    --loader stateful   each rank reads its own files, with torchdata's `StatefulDataLoader`; shares stay even

Either way the resumed run reads on at the window of text where the first one stopped. Look at `stream.png` in the
folder: the losses of both runs are one line, although with `shared` each run has measured its own shares.
"""

import argparse
import csv
import random
import sysconfig
from itertools import cycle, islice, pairwise
from pathlib import Path

import torch
from daso_char_gpt import INDENT, TAB, CharGPT, encode
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from matplotlib.figure import Figure
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import EmulatedSpeed, HeteroDDPStrategy, SharedStream

MOST = 64  # windows of text from one file, so that no file is long
FILES = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
TEST_FILES, TRAIN_FILES = FILES[::10], [file for i, file in enumerate(FILES) if i % 10]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}


class SourceCode(IterableDataset):
    """Windows of text from files, of which one at a time is in memory. Each epoch has another order of the files.

    `SharedStream` uses `__iter__` and `set_epoch`; `StatefulDataLoader` uses the state.
    """

    def __init__(self, files, context):
        self.files, self.context = files, context
        self.epoch, self.read = 0, 0  # where the stream stands

    def set_epoch(self, epoch):
        self.epoch, self.read = epoch, 0

    def state_dict(self):
        return {"epoch": self.epoch, "read": self.read}

    def load_state_dict(self, state):
        self.epoch, self.read = state["epoch"], state["read"]

    def windows(self):
        for file in random.Random(self.epoch).sample(self.files, len(self.files)):
            text = encode(file.read_text("utf-8", errors="replace").replace(INDENT, TAB))
            yield from text.unfold(0, self.context + 1, self.context)[:MOST] if len(text) > self.context else ()

    def __iter__(self):
        for window in islice(self.windows(), self.read, None):
            self.read += 1
            yield (window,)
        self.set_epoch(self.epoch + 1)


class Text(LightningDataModule):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def train_dataloader(self):
        options, files = self.options, TRAIN_FILES[: self.options.files]
        if options.loader == "shared":
            return DataLoader(SharedStream(SourceCode(files, options.context)), options.batch_size)
        own = files[self.trainer.global_rank :: self.trainer.world_size]
        return StatefulDataLoader(SourceCode(own, options.context), options.batch_size)

    def test_dataloader(self):
        windows = [window for [window] in islice(SourceCode(TEST_FILES, self.options.context), 512)]
        return DataLoader(TensorDataset(torch.stack(windows)), batch_size=32)


class StreamGPT(CharGPT):
    def training_step(self, batch, batch_idx):
        bits = self.bits(batch)
        self.log("bits", bits, sync_dist=True)  # of the samples of all ranks
        self.log("windows", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        return bits


class Watch(Callback):
    """The loss of all ranks together at each step, and the samples of each; stops after so many steps."""

    def __init__(self, stop=None, path=None):
        self.stop, self.path = stop, path
        self.rows = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        shares = pl_module.all_gather(torch.tensor(len(batch[0]))).flatten().tolist()
        logged = {name: trainer.callback_metrics[name].item() for name in ("bits", "windows")}
        self.rows.append({"step": trainer.global_step, "epoch": trainer.current_epoch, **logged})
        self.rows[-1].update({f"rank{rank}": share for rank, share in enumerate(shares)})
        if trainer.global_step % 25 == 0 and trainer.is_global_zero:
            print(f"step {trainer.global_step}: {logged['bits']:.2f} bits, windows per rank: {shares}", flush=True)
        if trainer.global_step == self.stop:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def train(options, stop=None, resume=None):
    """The rows of a `Watch`, and the bits per character of files that were not trained on."""
    seed_everything(1, verbose=False)
    path = options.out / "stopped.ckpt"
    watch = Watch(stop, path)
    trainer = Trainer(
        strategy=HeteroDDPStrategy(),
        accelerator="cpu",
        devices=len(options.seconds),
        max_steps=options.steps,
        callbacks=[watch, EmulatedSpeed([(0, seconds) for seconds in options.seconds])],
        **QUIET,
    )
    model, text = StreamGPT(options.context, 32, options.layers, lr=0.01), Text(options)
    trainer.fit(model, text, ckpt_path=path if resume else None)
    [metrics] = trainer.test(model, text, verbose=False)
    return watch.rows, metrics["test_bits"], trainer.is_global_zero


def draw(straight, stopped, resumed, ranks, path):
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    runs = {"straight through": straight, "until it was stopped": stopped, "resumed from the checkpoint": resumed}
    looks = ("#BBBBBB", 5), ("#0072B2", 1.2), ("#D81B78", 1.2)
    for (label, rows), (colour, width) in zip(runs.items(), looks, strict=True):
        steps = [row["step"] for row in rows]
        top.plot(steps, [row["bits"] for row in rows], color=colour, linewidth=width, label=label)
        for rank, shade in zip(ranks, cycle(("#4B2E83", "#8C510A"))):
            wide = rows is straight
            bottom.step(steps, [row[rank] for row in rows], color=shade, linewidth=width, alpha=0.3 if wide else 1,
                        label=f"{rank}, {label if wide else 'stopped and resumed'}" if rows is not stopped else None,
                        where="mid")  # fmt: skip
    top.set_ylabel("loss, bits per character")
    bottom.set_ylabel("windows of text per step")
    bottom.set_xlabel("step")
    bottom.set_ylim(0, 1.6 * bottom.get_ylim()[1])  # room for the legend
    top.legend(loc="upper right")
    bottom.legend(loc="upper center", ncols=2)
    for axis in (top, bottom):
        axis.axvline(stopped[-1]["step"] + 0.5, color="#222222", linestyle=":")
        for before, row in pairwise(straight):
            if row["epoch"] > before["epoch"]:
                axis.axvline(row["step"] - 0.5, color="#3FA34D", linestyle="--")
    top.set_title("dotted: stopped and resumed; dashed: an epoch begins", fontsize="medium")
    figure.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = {"type": int, "metavar": "N"}
    seconds = {"type": float, "nargs": "+", "metavar": "X", "default": [0.008, 0.032]}
    parser.add_argument(
        "--seconds", **seconds, help="for a window of text, of each rank; 0: as fast as it is (%(default)s)"
    )
    parser.add_argument("--loader", choices=["shared", "stateful"], default="shared", help="see above (%(default)s)")
    parser.add_argument("--steps", **whole, default=120, help="steps of each run (%(default)s)")
    parser.add_argument("--files", **whole, default=30, help="files of source code to train on (%(default)s)")
    parser.add_argument("--batch-size", **whole, default=16, help="windows of text per rank and step (%(default)s)")
    parser.add_argument("--context", **whole, default=64, help="characters that the model sees (%(default)s)")
    parser.add_argument("--layers", **whole, default=2, help="of the model (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("stream"), help="folder for what it writes (%(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)  # ranks share this machine's cores
    options.out.mkdir(parents=True, exist_ok=True)
    straight, straight_bits, first = train(options)
    stopped, _, _ = train(options, stop=options.steps // 2)
    resumed, resumed_bits, _ = train(options, resume=True)
    if not first:
        return
    runs = {"straight": (straight, straight_bits), "resumed": (stopped + resumed, resumed_bits)}
    ranks = [name for name in straight[0] if name.startswith("rank")]
    print(f"\n{'run':12}{'steps':>7}{'windows':>10}{'test bits':>12}   windows per rank in the last step")
    for name, (rows, bits) in runs.items():
        windows = sum(row["windows"] for row in rows)
        print(f"{name:12}{len(rows):7}{windows:10,.0f}{bits:12.3f}   {[rows[-1][rank] for rank in ranks]}")
        with (options.out / f"{name}.csv").open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    largest = max(abs(a["bits"] - b["bits"]) for a, b in zip(straight, stopped + resumed, strict=True))
    print(f"stopped after step {len(stopped)}, in epoch {stopped[-1]['epoch']}; losses differ by {largest:.1e} at most")
    draw(straight, stopped, resumed, ranks, options.out / "stream.png")
    print(f"figure: {options.out / 'stream.png'}")


if __name__ == "__main__":
    main()
