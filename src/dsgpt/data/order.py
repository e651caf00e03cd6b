"""The order of the training windows: a pure function of (seed, position), the same at any number of ranks.

Window i of a token file is ``tokens[i*T : i*T + T + 1]``: T inputs and, shifted by one, T targets. Each epoch visits
the windows in a new order without replacement; global batch k holds the same windows at any number of ranks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def window_count(tokens: int, seq_length: int) -> int:
    """Windows of ``seq_length`` inputs, each with its shifted targets, in a file of ``tokens`` ids."""
    return max(0, (tokens - 1) // seq_length)


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The order of training windows over a whole run."""

    windows: int
    """Windows in the training file."""
    global_batch_size: int
    """Windows per optimizer step."""
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in one epoch; the remaining ``windows % global_batch_size`` windows are dropped."""
        return self.windows // self.global_batch_size

    def batch(self, step: int) -> "NDArray[np.int64]":
        """The windows of optimizer step ``step`` (from 0 over the whole run), shape (global_batch_size,), int64."""
        windows: NDArray[np.int64] = self.batches(step, step + 1)[0]
        return windows

    def batches(self, first: int, end: int) -> "NDArray[np.int64]":
        """The windows of the steps from ``first`` up to but not including ``end``, (steps, global_batch_size), int64.

        Many steps take little longer than one: most of the time is that of calling numpy.
        """
        import numpy as np  # noqa: PLC0415 - takes a sixth of the time of --help

        from dsgpt.data.permutation import shuffled  # noqa: PLC0415

        found = []
        while first < end:
            epoch, index = divmod(first, self.steps_per_epoch)
            steps = min(end - first, self.steps_per_epoch - index)
            positions = np.arange(index * self.global_batch_size, (index + steps) * self.global_batch_size)
            windows = shuffled(positions, size=self.windows, key=f"dsgpt order {self.seed} {epoch}")
            found.append(windows.reshape(steps, self.global_batch_size))
            first += steps
        return np.concatenate(found)
