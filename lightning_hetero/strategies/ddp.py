"""`hetero_ddp`: data-parallel training on ranks of unequal speed, exact against one process."""

from lightning_hetero.strategies.base import HeteroStrategy


class HeteroDDPStrategy(HeteroStrategy):
    """Data-parallel training: batches are split by measured speed, and gradients are weighted by samples.

    There is one replica, the world. After every step all ranks hold the weights that one process would have reached
    on the whole batch, whatever the split, to rounding, for losses that are means over samples (or over
    ``batch_weight``) and layers that do not couple samples.

    Source: HetGrad, Moreno-Alvarez et al. 2022: ``g = sum_i (n_i / N) g_i``.

    Takes the options of :class:`~lightning_hetero.strategies.base.HeteroStrategy`.

    Example::

        from lightning.pytorch import Trainer

        from lightning_hetero import HeteroDDPStrategy

        trainer = Trainer(strategy=HeteroDDPStrategy(balance=[3.0, 1.0]), accelerator="cpu", devices=2)
    """
