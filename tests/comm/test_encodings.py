"""Low-bit encodings against NumPy: the values that arrive, the residuals, and the number of bytes."""

import numpy as np
import pytest
import torch

from lightning_hetero.comm.compression import LOW_BIT, Encoding, encoding_of

WIRES = (*LOW_BIT, "topk:1", "topk:0.3", "topk:0.00390625", "topk:0.02:bits=2", "topk:1:bits=2")
LENGTHS = (1, 2, 49, 50, 51, 255, 256, 257, 12_801, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, 600_011)


def made(wire: str) -> Encoding:
    encoding = encoding_of(wire)
    assert encoding is not None
    return encoding


def drawn(length: int, seed: int = 0) -> np.ndarray:
    """Values of both signs, over several orders of magnitude."""
    draw = np.random.default_rng(seed + length)
    return (draw.normal(size=length) * 10.0 ** draw.uniform(-3, 0, size=length)).astype(np.float32)


def sent(encoding: Encoding, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """The values that arrive, the residuals, and the message."""
    rest, arrived = torch.tensor(values), torch.zeros(len(values))
    message = torch.full((encoding.bytes(len(values)),), 0xA5, dtype=torch.uint8)
    encoding.encode(rest, message)
    encoding.add(message, arrived)
    return arrived.numpy(), rest.numpy(), message


def rounded(values: np.ndarray, levels: int) -> np.ndarray:
    """The oracle of int8 and int4, with exact scales in fp64."""
    blocks = np.pad(values.astype(np.float64), (0, -len(values) % 256)).reshape(-1, 256)
    scales = np.abs(blocks).max(1, keepdims=True) / levels
    numbers = np.rint(blocks / np.where(scales, scales, 1))
    return (numbers * scales).ravel()[: len(values)]


@pytest.mark.parametrize("wire", WIRES)
def test_what_arrives_and_what_is_left_out_make_up_the_values(wire: str) -> None:
    encoding = made(wire)  # its memory is used again, with other lengths
    for length in LENGTHS:
        values = drawn(length)
        arrived, rest, _ = sent(encoding, values)
        assert np.abs(arrived.astype(np.float64) + rest - values).max() <= 2.0**-22 * np.abs(values).max()
        assert (arrived != 0).any()


@pytest.mark.parametrize("wire", WIRES)
def test_an_empty_vector_has_an_empty_message(wire: str) -> None:
    """A rank that holds nothing of a short parameter has one."""
    for part in sent(made(wire), np.zeros(0, np.float32)):
        assert len(part) == 0


@pytest.mark.parametrize(("wire", "levels"), [("int8", 127), ("int4", 7)])
def test_values_are_rounded_to_the_nearest_of_a_blocks_levels(wire: str, levels: int) -> None:
    for length in LENGTHS:
        values = drawn(length)
        arrived, rest, _ = sent(made(wire), values)
        scales = np.repeat(np.abs(np.pad(values, (0, -length % 256)).reshape(-1, 256)).max(1), 256)[:length] / levels
        # a scale in fp16 has a relative error of 2^-11 at most; that of a value is as many times larger as its level
        assert (np.abs(rest) <= scales * (0.5 + levels * 2.0**-11) + 1e-9).all()
        near = np.abs(arrived - rounded(values, levels)) <= scales * levels * 2.0**-10 + 1e-9
        assert near.mean() > 0.97  # the others lie halfway between two levels, up to the rounding of the scale


def levels(values: np.ndarray) -> np.ndarray:
    """The oracle of 2 bits, in fp64: the mean of each of four parts of a block."""
    out = np.pad(values.astype(np.float64), (0, -len(values) % 4096)).reshape(-1, 4096)
    for block in out:
        part = np.searchsorted(block.mean() + block.std() * np.array([-0.98, 0.0, 0.98]), block)
        for each in set(part):
            block[part == each] = block[part == each].mean()
    return out.ravel()[: len(values)]


def test_two_bits_are_the_means_of_four_parts_of_a_block() -> None:
    for length in LENGTHS:
        values = drawn(length)
        arrived, *_ = sent(made("2bit"), values)
        near = np.abs(arrived - levels(values)) <= 1e-3 * np.abs(values).max()
        assert near.mean() > 0.999  # the others lie at a cut


def test_two_bits_are_nearly_as_good_as_can_be() -> None:
    """Max (1960): the best four levels leave 0.1175 of a normal distribution's variance; even levels leave more."""
    values = np.random.default_rng(0).normal(size=1 << 18).astype(np.float32)
    _, rest, _ = sent(made("2bit"), values)
    assert np.square(rest).mean() == pytest.approx(0.1175, rel=0.02)


def test_of_the_largest_the_signs_arrive() -> None:
    values = np.random.default_rng(0).normal(size=64 * 4096).astype(np.float32)
    arrived, rest, _ = sent(made("topk:0.015625:bits=2"), values)
    kept = arrived != 0
    assert kept.mean() == pytest.approx(1 / 64)
    assert (np.sign(arrived[kept]) == np.sign(values[kept])).all()
    assert np.square(rest[kept]).mean() < 0.05 * np.square(values[kept]).mean()


@pytest.mark.parametrize("density", [0.02, 0.1, 1 / 3, 1.0])
def test_the_largest_of_each_group_is_sent(density: float) -> None:
    encoding = made(f"topk:{density}")
    group = int(np.ceil(1 / density - 1e-9))
    for length in LENGTHS:
        values = drawn(length)
        arrived, rest, _ = sent(encoding, values)
        for start in range(0, length, encoding.chunk):
            part = values[start : start + encoding.chunk]
            columns = np.pad(part, (0, -len(part) % group)).reshape(group, -1)
            largest = np.abs(columns).argmax(0)
            expected = np.zeros(columns.shape, bool)
            expected[largest, np.arange(columns.shape[1])] = True
            expected = expected.ravel()[: len(part)]
            touched = rest[start : start + len(part)] != part
            assert not (touched & ~expected).any()
            assert (touched | (np.abs(part) <= np.abs(part).max() / 10) | ~expected).all()
        assert (arrived != 0).sum() <= density * length + group


def test_bytes_are_those_of_theory() -> None:
    """A quarter and an eighth of fp32, scales included; for 2% of the values at most a fortieth."""
    for length in (1_000_000, 7_654_321):
        assert 1 <= made("int8").bytes(length) / length <= 1.02
        assert 1 <= made("int4").bytes(length) / (length / 2) <= 1.02
        assert made("topk:0.02").bytes(length) <= 4 * length / 40
        assert made("topk").bytes(length) == made("topk:0.02").bytes(length)
        assert 1 <= made("2bit").bytes(length) / (length / 4) <= 1.02
        # bits: the index (4), the value (4, or 2 below), and a scale of 16 for 256 values
        assert made("topk:0.1").bytes(length) == pytest.approx(length / 10 * (0.5 + 0.5 + 2 / 256), rel=0.001)
        few = made("topk:0.015625:bits=2").bytes(length)  # 256 times below fp32, and a last block that is filled up
        assert length / 64 <= few <= 1.02 * length / 64 + 256


@pytest.mark.parametrize("wire", WIRES)
def test_all_of_fp32s_range_and_zeros(wire: str) -> None:
    encoding = made(wire)
    for size in (1e-30, 1e-9, 1.0, 6e4, 1e9, 1e37):
        values = (drawn(1000) * size).astype(np.float32)
        arrived, rest, _ = sent(encoding, values)
        assert np.isfinite(arrived).all()
        assert np.abs(arrived.astype(np.float64) + rest - values).max() <= 2.0**-22 * np.abs(values).max()
        assert np.abs(arrived).max() >= (0.2 if "2" in wire.removeprefix("topk:0.02") else 0.8) * np.abs(values).max()
    for length in (1, 300, 70_000):
        arrived, rest, _ = sent(encoding, np.zeros(length, np.float32))
        assert not arrived.any()
        assert not rest.any()
    one = np.zeros(70_000, np.float32)
    one[69_999] = -3.0
    assert np.array_equal(sent(encoding, one)[0], one)


@pytest.mark.parametrize("wire", WIRES)
def test_the_same_values_make_the_same_message_and_the_whole_message_is_written(wire: str) -> None:
    first = sent(made(wire), drawn(1000))[2]
    encoding = made(wire)
    sent(encoding, drawn(70_000))
    again = torch.zeros_like(first)
    encoding.encode(torch.tensor(drawn(1000)), again)
    different = int((first != again).sum())
    assert different <= 6  # what aligns its two parts


def drift(wire: str, feedback: bool, messages: int = 200) -> float:
    """Distance between the sum of the values that arrive and that of the differences, relative to a difference."""
    encoding, length = made(wire), 5_003
    draw = np.random.default_rng(1)
    steady = drawn(length).astype(np.float64)
    rest, arrived, total = torch.zeros(length), np.zeros(length), np.zeros(length)
    for _ in range(messages):
        difference = (steady * (1 + 0.1 * draw.normal(size=length))).astype(np.float32)
        total += difference
        rest += torch.tensor(difference)
        message, out = torch.empty(encoding.bytes(length), dtype=torch.uint8), torch.zeros(length)
        encoding.encode(rest, message)
        encoding.add(message, out)
        arrived += out.double().numpy()
        if not feedback:
            rest.zero_()
    left = rest.double().numpy()
    return float(np.abs(arrived + left - total).max() / np.abs(steady).max())


@pytest.mark.parametrize("wire", LOW_BIT)
def test_nothing_is_lost_with_error_feedback(wire: str) -> None:
    """The law of conservation: the values that have arrived and the residuals are the sum of all differences."""
    assert drift(wire, feedback=True) <= 2e-4  # 200 roundings in fp32 of sums of 200 and less
    assert (
        drift(wire, feedback=False) >= {"int8": 0.05, "int4": 1.0, "2bit": 1.0, "topk:0.02": 50.0}[wire]
    )  # the control is biased
