"""How often somebody looks at the consensus, against how often replicas meet."""

from lightning_utilities.core.rank_zero import rank_zero_warn


class Looks:
    """Warns, once in a fit, if validation or checkpoints come more often than exchanges.

    Attributes:
        exchanges: that this replica has completed in this fit.
        before: at which step, and after how many exchanges, the latest look was; ``None``: there was none.
    """

    def __init__(self) -> None:
        self.exchanges = 0
        self.before: tuple[int, int] | None = None
        self._warned = False

    def look(self, step: int, between: str) -> None:
        """Note a look.

        Args:
            step: optimizer steps done.
            between: what a look sees between two exchanges; empty if it is worth no warning.
        """
        before = self.before
        if not between:
            return
        self.before = step, self.exchanges
        if before is None or self._warned:
            return
        if self.exchanges == before[1] and step > before[0]:
            self._warned = True
            rank_zero_warn(
                f"Replicas have not met between step {before[0]} and step {step}, at which validation or a "
                f"checkpoint looks at them again. Between exchanges it sees {between}. Look less often "
                "(check_val_every_n_epoch, val_check_interval, every_n_train_steps), or lower tau."
            )
