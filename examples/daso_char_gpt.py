r"""Train a small GPT, character by character, on the source code of Python itself, with `hetero_daso`.

The ranks of a node average gradients at every step; nodes exchange parameters in the background, every few steps, while
they go on training. Two minutes on two processor cores, each of which passes for a node::

    python examples/daso_char_gpt.py --devices 2 --ranks-per-node 1

Two nodes of two ranks each, emulated on one machine, and two real ones, where the same runs on both (``--node-rank 1``
on the other), with one version of Python, so that they read the same text::

    python examples/daso_char_gpt.py --devices 4 --ranks-per-node 2
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr first-node --master-port 29500 \
        examples/daso_char_gpt.py --devices 2 --num-nodes 2

Look at the bits per character: 6.6 would be guessing, and with 2.3 it knows a good deal of Python. Then at the
exchanges, for which nobody waits most of the time, and at what the model writes.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import DASOStrategy
from lightning_hetero.callbacks.monitor import HeteroMonitor

INDENT, TAB = 4 * " ", "\t"  # one character rather than four: small models do not count well
CHARACTERS = "\N{REPLACEMENT CHARACTER}\n\t" + "".join(map(chr, range(32, 127)))  # the first stands for all others
SPELLED = 6  # characters, about a word


def source_code(limit):
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(file.read_text("utf-8", errors="replace") for file in files).replace(INDENT, TAB)[:limit]


def encode(text):
    codes = {character: code for code, character in enumerate(CHARACTERS)}
    return torch.tensor([codes.get(character, 0) for character in text])


class CharGPT(LightningModule):
    def __init__(self, context, width, layers, lr):
        super().__init__()
        self.save_hyperparameters()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.spelling = nn.Conv1d(width, width, SPELLED)  # attention alone would be slow to find the last few
        self.positions = nn.Embedding(context, width)
        nn.init.normal_(self.characters.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.logits = nn.Linear(width, len(CHARACTERS))

    def forward(self, codes):
        length = codes.shape[1]
        past = nn.Transformer.generate_square_subsequent_mask(length, device=codes.device)
        characters = self.characters(codes)
        spelled = self.spelling(nn.functional.pad(characters.mT, (SPELLED - 1, 0))).mT
        embedded = characters + spelled + self.positions.weight[:length]
        return self.logits(self.layers(embedded, past, is_causal=True))

    def bits(self, batch):
        [windows] = batch
        logits = self(windows[:, :-1]).transpose(1, 2)
        return nn.functional.cross_entropy(logits, windows[:, 1:]) / math.log(2)

    def training_step(self, batch, batch_idx):
        bits = self.bits(batch)
        self.log("bits", bits, prog_bar=True)
        return bits

    def test_step(self, batch, batch_idx):
        self.log("test_bits", self.bits(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def write(self, text, length, temperature=0.7):
        codes = encode(text).to(self.device)
        for _ in range(length):
            logits = self(codes[None, -self.hparams.context :])[0, -1]
            codes = torch.cat([codes, torch.multinomial((logits / temperature).softmax(0), 1)])
        return "".join(CHARACTERS[code] for code in codes).replace(TAB, INDENT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = {"type": int, "metavar": "N"}
    parser.add_argument("--devices", default="auto", help="devices to train on, per machine (%(default)s)")
    parser.add_argument("--num-nodes", **whole, default=1, help="machines (%(default)s)")
    parser.add_argument("--ranks-per-node", **whole, help="let every N ranks pass for a node (each machine is one)")
    parser.add_argument(
        "--global-every", **whole, default=4, help="steps between two exchanges, at first (%(default)s)"
    )
    parser.add_argument("--epochs", **whole, default=1, help="passes over the text (%(default)s)")
    parser.add_argument("--text", **whole, default=3_000_000, help="characters of source code to read (%(default)s)")
    parser.add_argument("--batch-size", **whole, default=16, help="windows of text per rank and step (%(default)s)")
    parser.add_argument("--context", **whole, default=64, help="characters that the model sees (%(default)s)")
    parser.add_argument("--width", **whole, default=128, help="of the model, a multiple of 32 (%(default)s)")
    parser.add_argument("--layers", **whole, default=3, help="of the model (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, metavar="X", help="highest learning rate (%(default)s)")
    parser.add_argument("--write", **whole, default=600, help="characters to write at the end (%(default)s)")
    options = parser.parse_args()

    seed_everything(1)
    text = encode(source_code(options.text))
    windows = text.unfold(0, options.context + 1, options.context)  # each ends with the character to follow
    held_out = len(windows) // 20
    train, test = TensorDataset(windows[:-held_out]), TensorDataset(windows[-held_out:])

    monitor = HeteroMonitor()
    strategy = DASOStrategy(
        global_every=options.global_every,
        wait="auto",  # as long as an exchange is measured to take
        wire="bf16",  # half the bytes
        schedule_every_n_steps=50,  # the loss is looked at more often than once per epoch: there are few
        ranks_per_node=options.ranks_per_node,
    )
    trainer = Trainer(
        strategy=strategy,
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        callbacks=[monitor],
        logger=CSVLogger("."),
        log_every_n_steps=10,
    )
    model = CharGPT(options.context, options.width, options.layers, options.lr)
    if trainer.is_global_zero:
        print(f"{len(text):,} characters of source code, the last {held_out * options.context:,} to test on")
    trainer.fit(model, DataLoader(train, batch_size=options.batch_size, shuffle=True))
    [metrics] = trainer.test(model, DataLoader(test, batch_size=32), verbose=False)

    if trainer.is_global_zero:
        traffic, guessing = strategy.traffic, math.log2(len(CHARACTERS))
        print(f"bits per character: {metrics['test_bits']:.2f} (guessing: {guessing:.2f})")
        print(f"samples per step of each rank: {monitor.history[-1].shares}")
        print(
            f"{traffic.exchanges} exchanges between nodes: {traffic.bytes / 1e6:.0f} MB sent by this node in "
            f"{traffic.seconds:.1f} s, for {traffic.exposed:.1f} s of which it waited"
        )
        print(f"all measurements: {trainer.logger.log_dir}/metrics.csv")
        print(f"what the model writes:\n{model.eval().write('class ', options.write)}")


if __name__ == "__main__":
    main()
