"""Rank under PyTorch's own averagers, in a plain loop. Needs PyTorch only."""

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import plain
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager


@contextmanager
def alone(setting: plain.Setting) -> Iterator[plain.Parts]:
    """Every rank for itself: what the loop takes."""
    yield plain.Parts(setting.net, setting.optimizer)


@contextmanager
def hierarchical(setting: plain.Setting) -> Iterator[plain.Parts]:
    """Averages within nodes every few steps, and of all ranks now and then."""
    setting.meeting.process_group()
    node = int(os.environ["LOCAL_WORLD_SIZE"])
    within, every = setting.number("within", 2), setting.number("every", 16)
    averager = HierarchicalModelAverager(OrderedDict([(within, node), (every, setting.meeting.world)]))
    parameters = list(setting.net.parameters())
    yield plain.Parts(setting.net, setting.optimizer, lambda: averager.average_parameters(parameters))


if __name__ == "__main__":
    plain.main({"torch_alone": alone, "torch_hierarchical": hierarchical})
