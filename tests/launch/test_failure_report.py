"""Terminal output when ranks fail: the traceback of the first one, and a line for each other rank."""

import re
from pathlib import Path

import pytest
from scripts import run_script

from lightning_hetero.errors import UnsupportedError
from lightning_hetero.launch import failure_report

SCRIPT = """
import sys
import lightning.pytorch as pl
import lightning_hetero
from lightning.pytorch.demos.boring_classes import BoringModel

how = sys.argv[1]


class Model(BoringModel):
    def training_step(self, batch, i):
        loss = super().training_step(batch, i)["loss"]
        if i == 2 and how == "nan" and self.global_rank == 1:
            return loss * float("nan")
        if i == 2 and (how in ("alike", "hooked") or (how == "one" and self.global_rank == 1)):
            raise ValueError("a fault in the step")
        if i == 2 and how == "different":
            raise [ValueError, KeyError][self.global_rank](f"a fault of rank {self.global_rank}")
        return loss


if how == "hooked":
    def hook(*_):
        print("HOOK", file=sys.stderr)
        print("a logger has heard of it")
    sys.excepthook = hook
trainer = pl.Trainer(strategy="hetero_ddp", accelerator="cpu", devices=2, max_epochs=1, limit_val_batches=0,
                     logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
if how == "caught":
    how = "one"
    try:
        trainer.fit(Model())
    except Exception as error:
        print("caught", type(error).__name__)
else:
    trainer.fit(Model())
"""


def _printed(folder: Path, how: str, status: int = 1) -> list[str]:
    """Output of each of two ranks from its failure on."""
    (folder / "train.py").write_text(SCRIPT)
    found = run_script(folder / "train.py", how, folder=folder, ranks=2)
    assert [one for one, _ in found] == [status] * 2, found
    return [
        text[text.find("lightning_hetero: rank") :] if "lightning_hetero: rank" in text else text for _, text in found
    ]


def test_the_rank_that_failed_prints_its_traceback_and_the_other_one_line(tmp_path: Path) -> None:
    echo, cause = _printed(tmp_path, "one")
    assert re.fullmatch(
        r"lightning_hetero: rank 0 of 2 on \S+ ended because rank 1 failed with ValueError: a fault in the step\.\n",
        echo,
    )
    lines = cause.splitlines()
    assert re.fullmatch(r"lightning_hetero: rank 1 of 2 on \S+ failed:", lines[0])
    assert lines[-2] == "ValueError: a fault in the step"
    assert "train.py" in cause
    assert "site-packages" not in cause
    whole = Path(lines[-1].rpartition(" ")[2])  # where all frames are
    text = whole.read_text()
    whole.unlink()
    assert "site-packages" in text
    assert text.rstrip().endswith("ValueError: a fault in the step")


def test_of_ranks_that_fail_alike_one_prints_the_traceback(tmp_path: Path) -> None:
    texts = sorted(_printed(tmp_path, "alike"), key=len)
    assert re.fullmatch(
        r"lightning_hetero: rank (\d) of 2 on \S+ ended with the same error as rank (?!\1)\d\.\n", texts[0]
    )
    assert texts[1].count("Traceback") == 1


def test_another_error_is_told_in_short_with_a_file(tmp_path: Path) -> None:
    other, first = sorted(_printed(tmp_path, "different"), key=len)
    assert first.count("Traceback") == 1
    found = re.fullmatch(
        r"lightning_hetero: rank \d of 2 on \S+ failed, too, with (.+) \(train.py:\d+\)\. Its traceback: (.+)\n", other
    )
    assert found is not None, other
    text = Path(found[2]).read_text()
    Path(found[2]).unlink()
    assert text.startswith("Traceback")
    assert found[1] in text


def test_of_an_error_that_all_ranks_raise_one_prints_the_traceback(tmp_path: Path) -> None:
    first, other = _printed(tmp_path, "nan")
    assert first.count("Traceback") == 1
    assert "lightning_hetero.errors.NotFiniteError: At step 3" in first
    assert other.count("\n") == 1
    assert "ended with the same error as rank 0." in other


def test_the_hooks_of_others_are_called(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for _, text in run_script(tmp_path / "train.py", "hooked", folder=tmp_path, ranks=2):
        assert text.count("a logger has heard of it") == 1
        assert text.count("lightning_hetero: rank") == 1
        assert "HOOK" not in text


def test_an_error_that_is_caught_is_the_users(tmp_path: Path) -> None:
    echo, cause = _printed(tmp_path, "caught", status=0)
    assert "caught ValueError" in cause
    assert "caught CommunicationError" in echo
    assert "lightning_hetero: rank" not in echo + cause


# -- which frames are shown ------------------------------------------------------------------------------------


def _raised(function, *arguments) -> BaseException:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError


def _within_libraries(error: Exception) -> None:
    import json

    def of_user(_: str) -> None:
        raise error

    json.loads('{"a": 1}', object_hook=of_user)


def test_frames_of_libraries_stay_only_where_the_error_was_raised() -> None:
    text, whole = failure_report._relevant(_raised(_within_libraries, ValueError("no")))
    assert not whole
    assert "json" not in text.replace("json.loads", "")
    assert text.count("  File ") == 3
    import json

    text, whole = failure_report._relevant(_raised(json.loads, "{"))
    assert whole
    assert "decoder.py" in text


def test_an_error_of_this_package_says_all_by_itself() -> None:
    def refuse() -> None:
        raise UnsupportedError("no")

    error = _raised(eval, "refuse()", {"refuse": refuse, "__name__": "lightning_hetero"})
    text, _ = failure_report._relevant(error)
    assert text.endswith("UnsupportedError: no\n")


def test_what_an_error_came_from_is_shown_likewise() -> None:
    def wrap() -> None:
        try:
            _within_libraries(KeyError("first"))
        except KeyError as error:
            raise ValueError("second") from error

    text, whole = failure_report._relevant(_raised(wrap))
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.index("ValueError: second")
    assert "json" not in text.replace("json.loads", "")
    assert not whole


def test_torchrun_gets_the_error_unless_the_program_has_told_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    failure_report._tell_torchrun(_raised(_within_libraries, ValueError("no")), "rank 1 of 2 on here")
    assert "ValueError: no (test_failure_report.py" in file.read_text()
    file.write_text("its own")
    failure_report._tell_torchrun(ValueError("no"), "rank 1")
    assert file.read_text() == "its own"
