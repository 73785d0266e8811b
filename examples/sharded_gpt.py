r"""Train a GPT that shards itself within each replica (`fully_shard`, FSDP2), in replicas of unequal size.

The first two ranks are a replica and share the model between them; the third one holds all of it alone. Inside a
replica gradients are averaged at every step. Replicas exchange shards every `tau` steps, with `hetero_diloco`. The text
is the source code of Python, a stream that ranks share by their speed. A minute on two processor cores::

    python examples/sharded_gpt.py --ranks-per-node 2 1 --out sharded

On two machines, the first with two GPUs and the second with one (``--node-rank 1`` and ``--nproc-per-node 1`` there)::

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr first-node --master-port 29500 \
        examples/sharded_gpt.py --out /shared/folder

Checkpoints are directories, to which each rank writes its shards. Kill a rank, and all end with an error that names it.
The same command goes on from a checkpoint with its path::

    python examples/sharded_gpt.py --ranks-per-node 2 1 --out sharded --resume sharded/step=100.ckpt

Replicas of equal size can be lost, and started again. Begin with two replicas, and kill a rank with ``kill -9``: its
replica ends, and the other one goes on. The second command is a replica that joins it, on any machine that sees the
file::

    python examples/sharded_gpt.py --ranks-per-node 2 2 --steps 2000 --join-file sharded.job
    python examples/sharded_gpt.py --ranks-per-node 2 --steps 2000 --join-file sharded.job
"""

import argparse
import math
import os
from itertools import islice
from pathlib import Path

import torch
from daso_char_gpt import CHARACTERS
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from stream_char_gpt import TEST_FILES, TRAIN_FILES, SourceCode
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import DiLoCoStrategy, SharedStream


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    def __init__(self, context, width, layers, lr):
        super().__init__()
        self.save_hyperparameters()

    def configure_model(self):
        if hasattr(self, "blocks"):  # called at each fit and validation
            return
        context, width, layers, _ = self.hparams.values()
        with torch.device("meta"):  # no rank ever holds more than its shards, and the layer that is at work
            self.characters, self.positions = nn.Embedding(len(CHARACTERS), width), nn.Embedding(context, width)
            self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))
            self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, len(CHARACTERS))
        mesh = self.device_mesh["data_parallel"]  # the ranks of this replica
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, windows):
        codes, following = windows[:, :-1], windows[:, 1:]
        x = self.characters(codes) + self.positions.weight[: codes.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.logits(self.norm(x)).float().transpose(1, 2)
        return nn.functional.cross_entropy(logits, following) / math.log(2)  # bits per character

    def training_step(self, batch, batch_idx):
        return self(batch[0])  # by the module's call: so its shards are gathered

    def validation_step(self, batch, batch_idx):
        self.log("bits", self(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Text(LightningDataModule):
    def __init__(self, context, batch_size):
        super().__init__()
        self.context, self.batch_size = context, batch_size

    def train_dataloader(self):
        return DataLoader(SharedStream(SourceCode(TRAIN_FILES, self.context)), self.batch_size)

    def val_dataloader(self):
        windows = [window for [window] in islice(SourceCode(TEST_FILES, self.context), 256)]
        return DataLoader(TensorDataset(torch.stack(windows)), batch_size=32)


class Tell(Callback):
    """Print the shards of each rank and its partners; then the loss of rank 0 now and then."""

    def on_train_start(self, trainer, pl_module):
        whole = sum(p.numel() for p in pl_module.parameters())
        own = sum(p.to_local().numel() for p in pl_module.parameters())
        plan = trainer.strategy.columns or "there is one replica, and nothing to exchange"
        rank = f"rank {trainer.global_rank} (process {os.getpid()})"
        print(f"{rank} holds {own:,} of {whole:,} parameters: {plan}", flush=True)
        if trainer.is_global_zero:
            print(f"training starts at step {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % 25 == 0 and trainer.is_global_zero:
            print(f"step {trainer.global_step}: {outputs['loss']:.2f} bits on rank 0", flush=True)

    def on_train_end(self, trainer, pl_module):
        traffic = trainer.strategy.traffic
        sent = f"{traffic.bytes / 1e6:.1f} MB in {traffic.exchanges} exchanges"
        print(f"rank {trainer.global_rank} has sent to other replicas: {sent}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    whole = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--ranks-per-node", **whole, nargs="+", help="let so many ranks pass for a node each (each machine is one)"
    )
    parser.add_argument("--accelerator", default="auto", help="such as cpu or cuda (%(default)s)")
    parser.add_argument("--precision", default="bf16-mixed", help="of the Trainer (%(default)s)")
    parser.add_argument("--wire", default="bf16", help="number format between replicas: fp32, bf16, fp16 (%(default)s)")
    parser.add_argument("--tau", **whole, default=10, help="steps between two exchanges (%(default)s)")
    parser.add_argument("--steps", **whole, default=200, help="steps at which training ends (%(default)s)")
    parser.add_argument("--save-every", **whole, default=50, help="steps between two checkpoints (%(default)s)")
    parser.add_argument("--batch-size", **whole, default=16, help="windows of text per rank and step (%(default)s)")
    parser.add_argument("--context", **whole, default=64, help="characters that the model sees (%(default)s)")
    parser.add_argument("--width", **whole, default=128, help="of the model, a multiple of 32 (%(default)s)")
    parser.add_argument("--layers", **whole, default=4, help="of the model (%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, metavar="X", help="learning rate (%(default)s)")
    parser.add_argument("--resume", type=Path, metavar="PATH", help="checkpoint to go on from")
    parser.add_argument(
        "--join-file", type=Path, metavar="PATH", help="go on without lost replicas, and let others join"
    )
    parser.add_argument("--out", type=Path, default=Path("sharded"), help="folder for checkpoints (%(default)s)")
    options = parser.parse_args()

    seed_everything(1, verbose=False)
    torch.set_num_threads(1)  # ranks share this machine's cores
    launched = "LOCAL_WORLD_SIZE" in os.environ  # by torchrun
    devices = int(os.environ["LOCAL_WORLD_SIZE"]) if launched else sum(options.ranks_per_node or [1])
    keep = ModelCheckpoint(options.out, filename="{step}", every_n_train_steps=options.save_every, save_top_k=-1)
    nodes = options.ranks_per_node
    if nodes and len(set(nodes)) == 1:
        [nodes] = set(nodes)  # each node that joins has as many
    elastic = {"on_peer_loss": "continue", "join_file": options.join_file} if options.join_file else {}
    trainer = Trainer(
        strategy=DiLoCoStrategy(tau=options.tau, replica="node", wire=options.wire, ranks_per_node=nodes, **elastic),
        accelerator=options.accelerator,
        devices=devices,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        precision=options.precision,
        max_steps=options.steps,
        callbacks=[keep, Tell()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = GPT(options.context, options.width, options.layers, options.lr)
    text = Text(options.context, options.batch_size)
    before = None if elastic else trainer.validate(model, text, ckpt_path=options.resume, verbose=False)[0]["bits"]
    trainer.fit(model, text, ckpt_path=options.resume)
    [after] = trainer.validate(model, text, verbose=False)
    if trainer.is_global_zero:
        began = "" if before is None else f"{before:.2f} before, "
        print(f"bits per character: {began}{after['bits']:.2f} after (guessing: 6.61)")
        print(f"checkpoint: {keep.best_model_path}, a directory of {len(os.listdir(keep.best_model_path))} files")


if __name__ == "__main__":
    main()
