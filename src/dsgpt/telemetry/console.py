"""What a run says: to the terminal and, word for word, to ``train.log``. Progress bars go to the terminal alone."""

import contextlib
import sys
import time
from io import FileIO
from pathlib import Path

from tqdm import tqdm

from dsgpt.common.files import PRINTABLE, append_to


def duration(seconds: float) -> str:
    """``0.4 s``, ``42 s``, ``3 min 05 s`` or ``2 h 07 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Console:
    """Speaks on the main rank and is silent on the others."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._log: FileIO | None = None
        self._early: list[str] = []

    def log_to(self, path: Path) -> None:
        """Copy what was said so far, and all that follows, to ``path``, after what it holds already."""
        if self._speaks:
            self._log = append_to(path)  # unbuffered: a line that a full disk refuses must not come again
            self._log.write("".join(f"{line}\n" for line in self._early).encode(errors=PRINTABLE))
            self._early.clear()

    def say(self, line: str = "") -> None:
        """Print one line, above a progress bar if one is shown.

        A terminal that is gone, a reader that ended and a full disk end no training: the line is lost.
        """
        if not self._speaks:
            return
        with contextlib.suppress(OSError):
            tqdm.write(line, file=sys.stdout)
            sys.stdout.flush()
        if self._log is None:
            self._early.append(line)
            return
        with contextlib.suppress(OSError):
            self._log.write(f"{line}\n".encode(errors=PRINTABLE))

    def progress(self, *, total: int, done: int = 0, what: str, unit: str) -> "Progress":
        """A progress bar with its time to completion; where the output is no terminal, only the printed lines tell."""
        return Progress(total=total, done=done, what=what, unit=unit, shown=self._speaks and sys.stderr.isatty())

    def close(self) -> None:
        """Close the log."""
        if self._log:
            self._log.close()
            self._log = None


class Progress:
    """A tqdm bar, and the time left in words for lines that are logged."""

    def __init__(self, *, total: int, done: int, what: str, unit: str, shown: bool) -> None:
        self._bar = tqdm(
            total=total, initial=done, desc=what, unit=unit, disable=not shown, dynamic_ncols=True, leave=False
        )
        self._total, self._first, self._done = total, done, done
        self._started = time.perf_counter()

    def advance(self, count: int = 1) -> None:
        """Note that ``count`` more are done."""
        self._done += count
        self._bar.update(count)

    def time_left(self) -> str:
        """The time to completion at the speed so far, evaluation and saving included."""
        done = self._done - self._first
        if done == 0:
            return "unknown"
        return duration((self._total - self._done) * (time.perf_counter() - self._started) / done)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()
