"""A piece of work of the main rank that goes on beside training, and how all ranks hear of its end."""

import threading
from collections.abc import Callable

from dsgpt.errors import NonFiniteError, SaveError
from dsgpt.process_group import HostGroup, from_main


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

    def is_done(self) -> bool:
        """Whether the work has ended; collective, and the same answer everywhere."""
        return self.busy and bool(self._ranks.largest(int(self._is_main and not self._thread.is_alive())))

    def wait(self) -> int:
        """Wait for the end of the work, and answer with its result, on every rank; collective.

        Raises:
            SaveError: and
            NonFiniteError: as the work did, on every rank.
            RuntimeError: the work failed in another way, which the main rank shows.
        """
        self.join()
        self.busy = False
        kind, message, result = from_main((type(self._error).__name__, str(self._error), self._result))
        for known in (SaveError, NonFiniteError):
            if kind == known.__name__:
                raise known(message)
        if kind != type(None).__name__:
            raise RuntimeError(f"the work beside training failed: {kind}: {message}") from self._error
        return result

    def join(self) -> None:
        """Wait for the end of the work on this rank, whatever it is; not collective."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
