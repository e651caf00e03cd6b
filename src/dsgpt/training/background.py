"""A piece of work of the main rank that goes on beside training, and how all ranks hear of its end."""

import threading
from collections.abc import Callable

from dsgpt.common.errors import NonFiniteError, SaveError
from dsgpt.common.files import print_traceback
from dsgpt.runtime.process_group import HostGroup, from_main


class Background:
    """One piece of work at a time, in a thread of the main rank. Every rank makes one and calls it alike.

    Args:
        ranks: all of them.
        is_main: whether this is the main rank.
    """

    def __init__(self, ranks: HostGroup, *, is_main: bool) -> None:
        self._ranks, self._is_main = ranks, is_main
        self._thread: threading.Thread | None = None
        self._result = 0
        self._error: BaseException | None = None
        self.busy = False
        """Whether something was begun whose end was not waited for; the same on every rank."""

    def begin(self, work: Callable[[], int]) -> None:
        """Let the main rank do ``work``; nothing may be under way."""
        self.busy, self._error = True, None
        if self._is_main:
            self._thread = threading.Thread(target=self._do, args=(work,), name="background")
            self._thread.start()

    def _do(self, work: Callable[[], int]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self._error = error
            if not isinstance(error, SaveError | NonFiniteError):
                print_traceback()

    def is_done(self) -> bool:
        """Whether the work has ended; collective, and the same answer everywhere."""
        return self.busy and bool(self._ranks.largest(int(self._is_main and not self._thread.is_alive())))

    def wait(self) -> int:
        """Wait for the end of the work, and answer with its result, on every rank; collective.

        Raises:
            NonFiniteError: as the work did, on every rank.
            SaveError: the work failed in another way.
        """
        _, error, result = self.end()
        kind, message, result = from_main((type(error).__name__, str(error), result))
        if kind == NonFiniteError.__name__:
            raise NonFiniteError(message)
        if kind == SaveError.__name__:
            raise SaveError(message)
        if kind != type(None).__name__:
            raise SaveError(f"{kind}: {message}") from error
        return result

    def end(self) -> tuple[bool, BaseException | None, int]:
        """Wait for the end of the work on this rank, whatever it is; not collective.

        Returns:
            Whether this rank had something under way that nobody had waited for, its error, and its result.
        """
        had = self._thread is not None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.busy = False
        return had, self._error, self._result
