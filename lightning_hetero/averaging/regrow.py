"""Parameters that become trainable, or frozen, during a fit: an averager goes on with other values."""

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from lightning_hetero.averaging.averager import Averager, StepContext
from lightning_hetero.comm.regrowth import Regrowth


def regrow(averager: Averager, context: StepContext, optimizers: Callable[[], Sequence[Optimizer]]) -> None:
    """Let an averager go on with the parameters that are trainable now, between two steps (collective).

    What is under way is completed first. What the averager holds of old values it keeps; added ones begin from the
    model's values, which must be the same on all ranks. Parameters that are frozen now get the consensus.

    Args:
        averager: of the running fit.
        context: of the latest step.
        optimizers: gives the optimizers.
    """
    averager.complete(context)
    growth = Regrowth(averager.replica, averager.replica.anew())
    if growth.left:
        growth.settle(averager.consensus(context))
    state = averager.regrown(averager.state_dict(), growth)
    averager.links.gather(None)  # all have what they need of the others
    averager.close()
    averager.setup(growth.new, averager.links, optimizers, averager.run)
    averager.load_state_dict(state)
