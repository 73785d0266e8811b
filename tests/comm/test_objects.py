"""Objects that leave a process: same values, in any container. (With a device: `tests/accelerator/test_border.py`.)"""

import ast
import dataclasses
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lightning_hetero
from lightning_hetero.comm import agreement
from lightning_hetero.comm.object_collectives import pack_value, portable, unpack_value
from lightning_hetero.errors import DisagreementError

PACKAGE = Path(lightning_hetero.__file__).parent
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Holder:
    tensor: torch.Tensor


KINDS = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "bfloat16": torch.arange(5, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3]),
    "conjugate": torch.tensor([1 + 2j, 3]).conj(),
    "column": torch.arange(12.0).view(3, 4)[:, 1],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "sparse": torch.eye(3).to_sparse(),
    "trained": torch.ones(2, requires_grad=True),
    "parameter": nn.Parameter(torch.ones(2)),
    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_arrives_as_it_was(kind: str) -> None:
    tensor = KINDS[kind]
    arrived = unpack_value(pack_value(tensor))
    assert (type(arrived), arrived.dtype, arrived.shape) == (type(tensor), tensor.dtype, tensor.shape)
    assert (arrived.layout, arrived.requires_grad) == (tensor.layout, tensor.requires_grad)
    assert torch.equal(arrived.detach().to_dense(), tensor.detach().to_dense())
    if arrived.layout == torch.strided and arrived.numel():
        with torch.no_grad():
            arrived[...] = 0  # its memory is its own


def test_a_part_of_a_large_tensor_is_a_small_message() -> None:
    assert len(pack_value(torch.zeros(10**6)[:2])) < 1000


def test_objects_of_any_class_go_as_they_are() -> None:
    linear = nn.Linear(2, 2)
    sent = {
        "builtins": [1, 2.5, "text", b"bytes", None, range(3), {4}, (5, 6)],
        "array": np.arange(3),
        "holder": Holder(torch.ones(3)),
        "pair": Pair(torch.zeros(1), torch.ones(1)),
        "module": linear,
        "device": torch.device("cpu"),
    }
    arrived = unpack_value(pack_value(sent))
    assert arrived["builtins"] == sent["builtins"]
    assert arrived["array"].tolist() == [0, 1, 2]
    assert torch.equal(arrived["holder"].tensor, torch.ones(3))
    assert type(arrived["pair"]) is Pair
    assert isinstance(arrived["module"].weight, nn.Parameter)
    assert torch.equal(arrived["module"].weight, linear.weight)
    assert arrived["device"] == torch.device("cpu")


def test_what_is_one_tensor_stays_one() -> None:
    tensor = torch.ones(3)
    first, second, third = unpack_value(pack_value([tensor, tensor, torch.ones(3)]))
    assert first is second
    assert first is not third


def test_a_file_of_cpu_tensors_is_what_it_was() -> None:
    state = {"module": nn.Linear(2, 2).state_dict(), "list": [torch.ones(1)], "pair": Pair(torch.ones(1), 3)}
    assert portable(state) is state


# -- one border ----------------------------------------------------------------------------------------------------

_OBJECTS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
_FILES = {"save"}


def _calls(names: set[str], of: set[str]) -> dict[str, list[str]]:
    """Calls of functions of some modules, by file."""
    found: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) in of:
                found.setdefault(str(file.relative_to(PACKAGE)), []).append(node.attr)
    return found


def test_objects_leave_a_process_in_one_place() -> None:
    files = set(_calls(_OBJECTS, {"dist", "torch.distributed"}))
    assert files == {
        "comm/object_collectives.py",
        "demo/run.py",
    }  # which runs beside Lightning's own strategies, on CPUs
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert "import pickle" not in text or file.name == "object_collectives.py", file


def test_files_are_written_by_plugins() -> None:
    """Plugins get the result of `portable`, also those of users; directories of shards are written by PyTorch."""
    written = _calls(_FILES, {"torch"})
    assert set(written) == {"checkpoint/writer.py", "checkpoint/directory.py"}
    assert "torch.save(portable(" in (PACKAGE / "checkpoint/directory.py").read_text()
    callers: dict[str, Any] = _calls(
        {"save_checkpoint"}, {"files", "self._files", "self.checkpoint_io", "strategy.checkpoint_io"}
    )
    # Of which the first takes copies itself.
    assert set(callers) == {"checkpoint/writer.py", "strategies/base.py"}
    assert "save_checkpoint(portable(" in (PACKAGE / "strategies/base.py").read_text()


def test_the_control_a_plain_pickle_takes_the_whole_memory() -> None:
    assert len(pickle.dumps(torch.zeros(10**5)[:2])) > 10**5


@pytest.mark.parametrize(
    ("second", "lines"),
    [
        ({"strategy": "B", "wire": "fp32"}, ["  strategy: rank 0: A, rank 1: B"]),
        ({"strategy": "A"}, ["  tau: rank 0: 3, rank 1: (missing)"]),
    ],
)
def test_names_that_some_ranks_lack_do_not_hide_what_differs(monkeypatch, second, lines):
    answers = iter([["one", "another"], [{"strategy": "A", "tau": 3}, second]])
    monkeypatch.setattr(agreement, "gather", lambda *_: next(answers))
    with pytest.raises(DisagreementError) as caught:
        agreement.check_equal("options", {})
    assert str(caught.value).splitlines()[1:] == lines
