"""Rank under accelerate: its LocalSGD, as in its guide."""

from collections.abc import Iterator
from contextlib import contextmanager

import plain
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD


@contextmanager
def local_sgd(setting: plain.Setting) -> Iterator[plain.Parts]:
    """Averages of all parameters every few steps."""
    setting.meeting.process_group()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(setting.net, setting.optimizer)
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=setting.number("every", 16)) as local:
        yield plain.Parts(model, optimizer, local.step, accelerator.backward)


if __name__ == "__main__":
    plain.main({"accelerate_local_sgd": local_sgd})
