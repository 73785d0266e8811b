"""Source code of Python's standard library, and a small GPT that continues it. Nothing of Lightning in here."""

import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

CHARACTERS = "\N{REPLACEMENT CHARACTER}\n\t" + "".join(map(chr, range(32, 127)))  # the first stands for all others
CONTEXT = 64  # characters that the model sees
WIDTH, LAYERS = 160, 4
TESTED = 128  # windows of text that nobody trains on


@cache
def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of text to train on, in the order of its files, and to test on: ``(windows, CONTEXT + 1)`` each.

    Every tenth file is for tests only, so that no sentence of it is trained on.
    """
    codes = {character: code for code, character in enumerate(CHARACTERS)}
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))

    def cut(chosen: list[Path]) -> torch.Tensor:
        text = "".join(file.read_text("utf-8", errors="replace") for file in chosen).replace(4 * " ", "\t")
        return torch.tensor([codes.get(character, 0) for character in text]).unfold(0, CONTEXT + 1, CONTEXT)

    test = cut(files[::10])
    chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:TESTED]
    return cut([file for number, file in enumerate(files) if number % 10]), test[chosen]


class Text(Dataset):
    """Windows of this rank's own part of the text, in an order of its own: ranks read different modules.

    Args:
        samples: how many there are for all ranks together.
        seed: of the order.

    Whichever indices a rank is given, it reads its own part; no two indices below ``len(part)`` have the same window.
    """

    def __init__(self, samples: int, seed: int) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        part = windows()[0].tensor_split(world)[rank]
        self.part = part[torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))]
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.part[index % len(self.part)]


class Embedding(nn.Module):
    """Characters and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for table in (self.characters, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.characters(codes) + self.positions.weight[: codes.shape[1]]


class Block(nn.Module):
    """Causal attention and two linear layers, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = WIDTH // 32
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


def gpt() -> nn.Sequential:
    """1.28 million parameters: 5.1 MB for every exchange."""
    return nn.Sequential(
        Embedding(), *(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))
    )


def loss_of(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Nats per character of windows ``(windows, CONTEXT + 1)``: each character is to be told from those before."""
    return nn.functional.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def inner_optimizer(parameters: Any, rate: float) -> torch.optim.Optimizer:
    """That of all contenders."""
    return torch.optim.AdamW(parameters, lr=rate)
