"""Work that a thread of the main rank does while training continues; all ranks learn together when it ends."""

import threading
from collections.abc import Callable

from dsgpt.common.errors import NonFiniteError, SaveError
from dsgpt.common.files import print_traceback
from dsgpt.runtime.process_group import HostGroup, from_main


class Background:
    """One piece of work at a time, in a thread of the main rank. Every rank has one and makes the same calls.

    Args:
        ranks: all ranks.
        is_main: whether this is the main rank.
    """

    def __init__(self, ranks: HostGroup, *, is_main: bool) -> None:
        self._ranks, self._is_main = ranks, is_main
        self._thread: threading.Thread | None = None
        self._result = 0
        self._error: BaseException | None = None
        self.busy = False
        """Whether work was begun and not waited for; the same on every rank."""

    def begin(self, work: Callable[[], int]) -> None:
        """Start ``work`` on the main rank; no other work may be running."""
        self.busy, self._error = True, None
        if self._is_main:
            self._thread = threading.Thread(target=self._do, args=(work,), name="background")
            self._thread.start()

    def _do(self, work: Callable[[], int]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - ``wait`` raises it on every rank
            self._error = error
            if not isinstance(error, SaveError | NonFiniteError):
                print_traceback()

    def is_done(self) -> bool:
        """Whether there is work that has ended; collective, with the same answer on every rank."""
        if not self.busy:
            return False
        ended = self._thread is not None and not self._thread.is_alive()
        return bool(self._ranks.largest(int(ended)))

    def wait(self) -> int:
        """Wait for the end of the work; returns its result on every rank; collective.

        Raises:
            NonFiniteError: the work raised it; on every rank.
            SaveError: the work failed in another way; on every rank.
        """
        _, error, own = self.end()
        kind: str
        message: str
        result: int
        kind, message, result = from_main((type(error).__name__, str(error), own))
        if kind == NonFiniteError.__name__:
            raise NonFiniteError(message)
        if kind == SaveError.__name__:
            raise SaveError(message)
        if kind != type(None).__name__:
            raise SaveError(f"{kind}: {message}") from error
        return result

    def end(self) -> tuple[bool, BaseException | None, int]:
        """Wait for the end of the work on this rank; not collective.

        Returns:
            Whether this rank had work that was not waited for, its error, and its result.
        """
        had = self._thread is not None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.busy = False
        return had, self._error, self._result
