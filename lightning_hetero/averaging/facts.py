"""What an algorithm between replicas says of itself, and of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What is always true of an algorithm.

    Attributes:
        blocking: all ranks wait for each other after a step that is :meth:`~Averager.due`.
        lockstep: all replicas exchange after the same steps.
        needs_others: one replica alone has nothing to average, and the averager is not asked.
        fresh_start: what a replica continues with after its own values were left out of an average because they were
            not finite, in words.
        between: what is validated and saved between two exchanges, in words, if that is worth a warning when it happens
            more often than exchanges. Then :attr:`Outcome.exchanged` must be told.
        regrows: parameters may become trainable, or frozen, during the fit: :meth:`~Averager.complete` and
            :meth:`~Averager.regrown` see to what the algorithm holds.

    Example::

        from lightning_hetero import Facts

        facts = Facts(needs_others=False)  # one replica alone has something to do, too
    """

    blocking: bool = True
    lockstep: bool = True
    needs_others: bool = True
    fresh_start: str = "the mean of the others"
    between: str = ""
    regrows: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a step, or the preparation or the end of a fit, has brought about.

    Attributes:
        exchanged: this replica has completed an exchange.
        warning: what to warn the user of.
        info: what to tell the user, without alarm. The strategy's name will stand before it.

    Example::

        from lightning_hetero import Outcome

        outcome = Outcome(exchanged=True, info="replicas have met for the first time")
    """

    exchanged: bool = False
    warning: str | None = None
    info: str | None = None
