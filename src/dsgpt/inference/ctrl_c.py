"""Ctrl-C as a request that a loop looks for, so that what it has made is not lost. Imports no torch."""

import signal
from types import FrameType, TracebackType


class CtrlC:
    """A context manager: inside, the first Ctrl-C sets ``asked``, and a second one raises ``KeyboardInterrupt``."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "CtrlC":
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
