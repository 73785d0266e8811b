"""Where a running job says how processes that are started later reach it."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from lightning_hetero.comm.background import Background
from lightning_hetero.errors import CommunicationError, ConfigurationError

_KEY = "lightning_hetero/job"
_HERE = timedelta(seconds=30)  # in which a store of this process answers; it may ask for the names of addresses first


class JobAddress(Protocol):
    """A place that holds the address of a job."""

    def read(self, limit: timedelta) -> list[Any] | None:
        """The address; ``None``: no job runs, as far as is known here.

        Args:
            limit: longest wait, where there may be somebody to wait for.
        """

    def write(self, address: Sequence[Any]) -> None:
        """Let others find it."""

    def remove(self, address: Sequence[Any]) -> None:
        """The job has ended. An address that another job has written stays."""


class AddressFile:
    """A file that all machines of a job see.

    Args:
        path: of the file. Anyone who can read it can take part in the job.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def read(self, limit: timedelta = timedelta(0)) -> list[Any] | None:
        """The address in the file, if there is one.

        Args:
            limit: of no use here.

        Raises:
            ConfigurationError: the file is something else.
        """
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"join_file={str(self.path)!r} cannot be read: {error}") from error
        with suppress(ValueError):
            address = json.loads(text)
            if isinstance(address, list) and len(address) == 3:
                return address
        raise ConfigurationError(
            f"join_file={str(self.path)!r} is there, but holds no job's address. Give the name of another file, or "
            "remove this one if nothing else needs it."
        )

    def write(self, address: Sequence[Any]) -> None:
        """Replace the file; only this user can read it.

        Raises:
            ConfigurationError: it cannot be written.
        """
        beside = self.path.with_name(f".{self.path.name}-{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(json.dumps(list(address)))
            beside.replace(self.path)
        except OSError as error:
            raise ConfigurationError(f"join_file={str(self.path)!r} cannot be written: {error}") from error

    def remove(self, address: Sequence[Any]) -> None:
        """Remove the file, unless another job has written it."""
        with suppress(OSError, ValueError):
            if json.loads(self.path.read_text()) == list(address):
                self.path.unlink()


class LauncherStore:
    """The store with which the ranks have met that the launcher started. Rank 0 of that start hosts it.

    Args:
        host: of rank 0, as the launcher says.
        port: the same.
        hosted: whether this process is that rank 0.
    """

    def __init__(self, host: str, port: int, hosted: bool) -> None:
        self._host, self._port, self._hosted = host, port, hosted
        self._kept: dist.Store | None = None  # a connection that stays when those of the process groups are cut

    def __str__(self) -> str:
        return f"{self._host}:{self._port}"

    def _store(self, limit: timedelta) -> dist.Store:
        return dist.TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=limit)

    def read(self, limit: timedelta) -> list[Any] | None:
        """The address that the job has written, if it has.

        Args:
            limit: longest wait for rank 0 of the start: this may be a first start.
        """
        if self._hosted:
            return None  # the store has yet to begin
        with suppress(dist.DistError, TimeoutError):  # on a thread: Ctrl-C would not end PyTorch's wait
            return Background(lambda: self._read(limit)).result(limit.total_seconds())
        return None

    def _read(self, limit: timedelta) -> list[Any] | None:
        store = self._store(limit)
        return json.loads(text) if store.check([_KEY]) and (text := store.get(_KEY)) else None

    def write(self, address: Sequence[Any]) -> None:
        """Write it to the store, if that is here. If its host was lost, it is gone.

        Raises:
            CommunicationError: this process hosts the store, and the store does not answer.
        """
        if self._hosted:
            try:
                self._set(json.dumps(list(address)))
            except dist.DistError as error:
                raise CommunicationError(
                    f"the store at {self} does not answer, with which later processes would find this job: {error}"
                ) from error

    def remove(self, address: Sequence[Any]) -> None:
        """Forget it; the store itself ends with this process."""
        if self._hosted:
            with suppress(dist.DistError):
                self._set("")

    def _set(self, text: str) -> None:
        self._kept = self._kept or self._store(_HERE)
        self._kept.set(_KEY, text)
