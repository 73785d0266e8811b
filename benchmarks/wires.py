"""How fast one core encodes and decodes fp32 vectors on low-bit wires, against adding vectors and plain encoders.

    python benchmarks/wires.py [--values 8000000] [--repeats 9]

Encoding includes error feedback: the values are added to the residual, and what the message leaves out stays there.
Decoding adds to a sum. Times are those of the thread, so that other programs count less.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_hetero.comm.compression import Encoding, encoding_of

WIRES = ("int8", "int4", "topk:0.02", "topk:0.1")


def plain_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """The control: the whole vector at once, in new memory, without error feedback."""
    blocks = values.view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scales).round().to(torch.int8), scales.half()


def plain_topk(values: Tensor) -> tuple[Tensor, Tensor]:
    """The control: the 2% that are largest in each 1024 values."""
    blocks = values.view(-1, 1024)
    where = blocks.abs().topk(20, dim=1, sorted=False).indices
    return where.to(torch.int16), blocks.gather(1, where)


def rate(function: Callable[[], object], values: int) -> float:
    """Gigabytes of fp32 per second."""
    began = time.thread_time()
    function()
    return 4 * values / (time.thread_time() - began) / 1e9


class Wire:
    """One wire with memory of its own."""

    def __init__(self, encoding: Encoding, values: torch.Tensor) -> None:
        self.encoding, self.values = encoding, values
        self.residual, self.sum = torch.zeros_like(values), torch.zeros_like(values)
        self.message = torch.empty(encoding.bytes(len(values)), dtype=torch.uint8)

    def encode(self) -> None:
        self.residual.add_(self.values)
        self.encoding.encode(self.residual, self.message)

    def decode(self) -> None:
        self.encoding.add(self.message, self.sum)


def shown(rates: list[float]) -> str:
    return f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--values", type=int, default=8_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    values = 1e-3 * torch.randn(options.values)
    target = torch.zeros_like(values)
    wires = {}
    for name in WIRES:
        encoding = encoding_of(name)
        assert encoding is not None
        wires[name] = Wire(encoding, values)
        wires[name].encode()  # the first one finds its memory
        wires[name].decode()
    whole = values[: options.values // 1024 * 1024]
    controls: dict[str, Callable[[], object]] = {
        "adding": lambda: target.add_(values),
        "plain int8": lambda: plain_int8(whole),
        "plain topk": lambda: plain_topk(whole),
    }
    control_rates: dict[str, list[float]] = {name: [] for name in controls}
    encoding_rates: dict[str, list[float]] = {name: [] for name in wires}
    decoding_rates: dict[str, list[float]] = {name: [] for name in wires}
    for _ in range(options.repeats):  # alternating
        for name, control in controls.items():
            control_rates[name].append(rate(control, options.values))
        for name, wire in wires.items():
            encoding_rates[name].append(rate(wire.encode, options.values))
            decoding_rates[name].append(rate(wire.decode, options.values))
    print(f"{options.values} values, {options.repeats} alternating runs; one thread, load {os.getloadavg()[0]:.2f}")
    for name, rates in control_rates.items():
        print(f"{name:10s} {shown(rates)} GB/s of fp32")
    for name, wire in wires.items():
        ratio = 4 * options.values / len(wire.message)
        for what, rates in (("encoding", encoding_rates[name]), ("decoding", decoding_rates[name])):
            relative = [own / plain for own, plain in zip(rates, control_rates["adding"], strict=True)]
            print(f"{name:10s} {what}: {shown(rates)} GB/s, {shown(relative)} of adding; 1/{ratio:.1f} of the bytes")


if __name__ == "__main__":
    main()
