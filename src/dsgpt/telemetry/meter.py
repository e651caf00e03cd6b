"""Times optimizer steps without making the device wait, and computes figures from them."""

import contextlib
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsgpt.common.errors import NonFiniteError
from dsgpt.data.loader import Batch
from dsgpt.machine.device import named_range
from dsgpt.record.schema import percentile

# Clocks: of the device that computes, and of a thread, which computes or sleeps.

Mark = float | torch.cuda.Event
"""An instant in the device's own time: seconds on CPU, an event on a GPU, which runs asynchronously."""


class DeviceClock:
    """Marks instants in the device's own time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Mark:
        """This instant."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's has no types
        event.record()
        return event

    def reached(self, mark: Mark) -> bool:
        """Whether the device has passed ``mark``; does not wait."""
        return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]  # torch's has no types

    def seconds_between(self, first: Mark, second: Mark) -> float:
        """Seconds from one mark to another; waits until the device has passed the second."""
        if isinstance(first, float):
            assert isinstance(second, float)  # a clock makes marks of one kind
            return second - first
        assert not isinstance(second, float)
        second.synchronize()
        return float(first.elapsed_time(second)) / 1000


class ThreadClock:
    """The seconds in which the thread that made it ran, or was ready to run and another process had its core.

    The rest of the time it slept: it waited for other ranks, for a process that reads data, or for a drive. Waiting for
    a core counts as computing, because a rank whose core is shared is slow for the others.

    The kernel counts the time that a thread runs (``CLOCK_THREAD_CPUTIME_ID``) and that it waits for a core
    (``run_delay`` in ``/proc/thread-self/schedstat``). Reading both takes about a microsecond. Without the second, as
    in some containers, waiting for a core counts as sleeping.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        if self._file is not None and len(os.pread(self._file, 80, 0).split()) < 2:
            self.close()

    def seconds(self) -> float:
        """Seconds so far; only differences have a meaning."""
        waited = 0 if self._file is None else int(os.pread(self._file, 80, 0).split()[1])
        return time.thread_time() + waited / 1e9

    def close(self) -> None:
        """Close the file of the kernel."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


# Times optimizer steps without making the device wait, and computes the lines and figures of the record from them.

WARM_UP_STEPS = 3
"""The first steps of a process, which compile, allocate and tune: throughput and step times leave them out."""


class StepResult(NamedTuple):
    """One optimizer step, seen from any rank; tensors stay on the device so that nothing waits for them."""

    loss: Tensor
    """0-dim fp32: mean cross-entropy over the global batch, nats per token."""
    own_loss: Tensor
    """0-dim fp32: mean over what this rank read of it; on the stages of a pipeline, that of the last one."""
    grad_norm: Tensor
    """0-dim fp32: 2-norm of the whole model's gradient, before clipping."""
    lr: float
    """The learning rate that this step used."""
    skipped: Tensor
    """0-dim bool: whether fp16 gradients overflowed, so that the weights did not change."""
    own_gradient: Tensor | None = None
    """0-dim fp32: not finite if a gradient of activations on this rank is not; None where the strategy has none."""
    own_exchange: Tensor | None = None
    """0-dim fp32: in which exchange of the forward pass this rank first gave an activation or its loss that was not
    finite, though all that it had received was; infinite if in none. None where ranks exchange no activations."""

    def own_non_finite(self) -> tuple[float, str]:
        """In which exchange this rank first gave what is not finite, infinity if in none; what that is, or nothing."""
        exchange = math.inf if self.own_exchange is None else float(self.own_exchange)
        if exchange < math.inf:
            return exchange, "an activation or loss"
        if not math.isfinite(self.own_loss):
            return exchange, "a loss"
        overflowed = self.own_gradient is not None and not math.isfinite(self.own_gradient)
        return exchange, "a gradient" if overflowed and not self.skipped else ""


class TimedBatches:
    """Micro batches, and the seconds that the device waited for them.

    Args:
        batches: those of a rank.
        idle: whether the device has nothing left to compute when a batch is there. If it has, it did not wait: a GPU
            computes while its process reads.
    """

    def __init__(self, batches: Iterable[Batch], *, idle: Callable[[], bool] = lambda: True) -> None:
        self._batches, self._idle = iter(batches), idle
        self.seconds = 0.0
        """Seconds waited since the last ``take_seconds``."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        with named_range("data"):
            batch = next(self._batches)
        if self._idle():
            self.seconds += time.perf_counter() - started
        return batch

    def take_seconds(self) -> float:
        """Seconds waited since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


_COUNTED = {"loss", "step_time_sec", "dataload_time_sec", "warm_up"}
"""The keys that a line must have to be counted as a step."""


class _Pending(NamedTuple):
    step: int
    epoch: int
    result: StepResult
    started: Mark
    ended: Mark
    dataload_sec: float
    computing_sec: float
    watched: bool


@dataclass(kw_only=True)
class Figures:
    """Sums over the steps of an epoch, or of a run."""

    steps: int = 0
    loss_sum: float | None = 0.0
    """Sum of losses; None where lines of steps are missing."""
    train_sec: float | None = 0.0
    """Seconds of all steps, warm-up included; None where lines of steps are missing."""
    data_sec: float = 0.0
    """Seconds of all steps that were spent waiting for data."""
    counted_tokens: int = 0
    """Tokens without the warm-up, like the two lists."""
    step_secs: list[float] = field(default_factory=list)
    dataload_secs: list[float] = field(default_factory=list)
    computing_sec: float = field(default=0.0, compare=False)
    """Seconds of the counted steps of this process in which its thread did not sleep; NaN where unknown."""

    def add(self, line: dict[str, Any], *, tokens: int, computing_sec: float = 0.0) -> None:
        """Count one training line of ``metrics.jsonl``, a step of ``tokens`` targets."""
        self.steps += 1
        self.data_sec += line["dataload_time_sec"]
        if self.loss_sum is not None and self.train_sec is not None:
            self.loss_sum += line["loss"]
            self.train_sec += line["step_time_sec"]
        if not line["warm_up"]:
            self.counted_tokens += tokens
            self.step_secs.append(line["step_time_sec"])
            self.dataload_secs.append(line["dataload_time_sec"])
            self.computing_sec += computing_sec

    def expect(self, steps: range, counted: list[int]) -> None:
        """Make the sums unknown unless ``counted`` has each of the taken ``steps`` once, and no other."""
        if counted != list(steps):
            self.steps, self.loss_sum, self.train_sec = len(steps), None, None

    def loss_mean(self) -> float | None:
        """Mean loss of the steps; None where it is unknown."""
        return None if self.loss_sum is None or not self.steps else self.loss_sum / self.steps

    def tokens_per_sec(self) -> float | None:
        """Tokens per second over all ranks, of training steps after the warm-up; None without such a step."""
        seconds = sum(self.step_secs)
        return self.counted_tokens / seconds if seconds else None


class StepMeter:
    """Collects the steps of a run."""

    def __init__(self, device: torch.device, *, tokens_per_step: int) -> None:
        self._clock = DeviceClock(device)
        self._tokens_per_step = tokens_per_step
        self._pending: list[_Pending] = []
        self._steps_seen = 0
        self._first_secs: list[float] = []
        """Seconds of the first step of each process, waits for data left out."""
        self._thread = ThreadClock() if device.type == "cpu" else None  # a GPU computes beside its thread
        self._thread_at_start = math.nan
        self.computing_sec = 0.0
        """Seconds of the last step in which the thread did not sleep; 0 on a GPU, which computes beside its thread."""
        self._origin = self._step_started = self._clock.mark()
        self._started = time.perf_counter()
        self.earlier_wall_sec = 0.0
        """Seconds of the run before this process."""
        self.epoch = Figures()
        self.run = Figures()
        self.process = Figures()
        """Figures of the steps that this process took."""
        self.interval = Figures()
        """Figures of the steps since the last line for the user, which starts it anew."""
        self.results: list[StepResult] = []
        """The steps of the last ``flush``."""
        self.last_own_loss: float = math.nan
        """Loss of the sequences that this rank read in the last step that ``flush`` returned."""
        self.last_loss: float | None = None
        self.on_step_read: Callable[[float], None] = lambda _: None
        """Called with the seconds of each step that the device has finished and ``flush`` has read."""

    def resume(
        self, lines: Iterable[dict[str, Any]], *, done: int, first_steps: Collection[int] = (), epoch_start: int
    ) -> None:
        """Count the steps that earlier processes of this run logged; lines that are missing make sums unknown.

        Args:
            lines: those of ``metrics.jsonl`` up to step ``done``.
            done: optimizer steps taken.
            first_steps: the first of each earlier process.
            epoch_start: how many of them belong to finished epochs.
        """
        counted: list[int] = []
        for line in lines:
            if all(line.get(key) is not None for key in _COUNTED):
                self.run.add(line, tokens=self._tokens_per_step)
                counted.append(line["step"])
                if line["step"] in first_steps:
                    self._first_secs.append(line["step_time_sec"] - line["dataload_time_sec"])
                if line["step"] > epoch_start:
                    self.epoch.add(line, tokens=self._tokens_per_step)
        self.run.expect(range(1, done + 1), counted)
        self.epoch.expect(range(epoch_start + 1, done + 1), [step for step in counted if step > epoch_start])

    def wall_seconds(self) -> float:
        """Seconds since the run started, without those between the processes of a resumed run."""
        return self.earlier_wall_sec + self.process_wall_seconds()

    def process_wall_seconds(self) -> float:
        """Seconds since this process began its part of the run."""
        return time.perf_counter() - self._started

    @property
    def compilation_sec(self) -> float:
        """Seconds by which the first step of each process exceeds the usual step; 0 before there is one."""
        usual = statistics.median(self.run.step_secs or [math.inf])
        return sum(max(0.0, seconds - usual) for seconds in self._first_secs)

    def start(self) -> None:
        """Mark the start of a step."""
        if self._thread is not None:
            self._thread_at_start = self._thread.seconds()
        self._step_started = self._clock.mark()

    def stop(self, *, step: int, epoch: int, result: StepResult, dataload_sec: float, watched: bool = False) -> None:
        """Mark the end of a step; its values stay on the device until ``flush``.

        Measuring traffic makes a step slower, so such a step (``watched``) is left out like the warm-up.
        """
        marks = self._step_started, self._clock.mark()
        computing_sec = math.nan if self._thread is None else self._thread.seconds() - self._thread_at_start
        self.computing_sec = 0.0 if self._thread is None else computing_sec
        self._pending.append(_Pending(step, epoch, result, *marks, dataload_sec, computing_sec, watched))

    def flush(self, *, wait: bool = True) -> list[dict[str, Any]]:
        """The steps since the last call as lines of ``metrics.jsonl``.

        Args:
            wait: for the device; otherwise the steps that it has not finished are returned by a later call.
        """
        pending, self._pending = self._pending, []
        lines = []
        for position, item in enumerate(pending):
            if not wait and not self._clock.reached(item.ended):
                self._pending = pending[position:]
                break
            lines.append(self._line(item))
            self.on_step_read(lines[-1]["step_time_sec"])
        self.results = [item.result for item in pending[: len(lines)]]
        if lines:
            self.last_own_loss = float(self.results[-1].own_loss)
        return lines

    def close(self) -> None:
        """Close the files of the clocks."""
        if self._thread is not None:
            self._thread.close()

    def _line(self, item: _Pending) -> dict[str, Any]:
        seconds = self._clock.seconds_between(item.started, item.ended)
        self._steps_seen += 1
        line = {
            "step": item.step,
            "epoch": item.epoch,
            "loss": float(item.result.loss),
            "lr": item.result.lr,
            "grad_norm": float(item.result.grad_norm),
            "skipped": bool(item.result.skipped),
            "tokens": item.step * self._tokens_per_step,
            "tokens_per_sec": self._tokens_per_step / seconds,
            "step_time_sec": seconds,
            "dataload_time_sec": item.dataload_sec,
            "warm_up": self._steps_seen <= WARM_UP_STEPS or item.watched,
            "train_time_sec": None if self.run.train_sec is None else self.run.train_sec + seconds,
            "wall_time_sec": self.earlier_wall_sec + self._clock.seconds_between(self._origin, item.ended),
        }
        if self._steps_seen == 1:
            self._first_secs.append(seconds - item.dataload_sec)
        self.last_loss = line["loss"]
        for figures in (self.epoch, self.run, self.process, self.interval):
            figures.add(line, tokens=self._tokens_per_step, computing_sec=item.computing_sec)
        return line


def require_finite(lines: Iterable[dict[str, Any]]) -> None:
    """Check the loss and gradient norm of every step.

    Raises:
        NonFiniteError: one is NaN or infinite. If fp16 loss scaling skipped the step, its norm is not checked.
    """
    for line in lines:
        if not math.isfinite(line["loss"]) or not (line["skipped"] or math.isfinite(line["grad_norm"])):
            values = f"loss {line['loss']:g}, gradient norm {line['grad_norm']:g}"
            cure = "lower the learning rate, lengthen the warm-up, or use bf16 or fp32"
            stopped = f"training stopped, and this state is not saved; {cure}"
            raise NonFiniteError(f"step {line['step']}: {values}: {stopped}")


# Figures of the steps between two lines for the user, over all ranks.


class RankShare(NamedTuple):
    """Figures of one rank for an interval; NaN for unknown ones, so that they can be gathered."""

    data_wait_sec: float
    """Seconds in which it waited for data, in the steps that count."""
    computing_sec: float
    """Seconds of the same steps in which its thread did not sleep; see ``ThreadClock``."""
    loss: float
    """Mean loss of what it read in the last step."""


@dataclass
class RankTimes:
    """Times of every rank in the steps that count, which take every rank equally long."""

    steps: int = 0
    step_sec: float = 0.0
    """Sum over the steps."""
    data_wait_sec: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by rank, as in ``computing_sec``."""
    computing_sec: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, figures: Figures, ranks: Sequence[RankShare]) -> None:
        """Add the times of an interval."""
        self.steps += len(figures.step_secs)
        self.step_sec += sum(figures.step_secs)
        for rank, share in enumerate(ranks):
            self.data_wait_sec[rank] += share.data_wait_sec
            self.computing_sec[rank] += share.computing_sec

    def figures(self) -> dict[str, float | None]:
        """The ranks that the others waited for, and for how long, by keys that ``docs/records.md`` explains.

        None where no step counts; the slowest rank also on GPUs, and for one rank.
        """
        slowest = lag = data_wait_rank = None
        if self.steps:
            data_wait_rank = max(self.data_wait_sec, key=self.data_wait_sec.__getitem__)
        if self.steps and len(self.computing_sec) > 1 and all(map(math.isfinite, self.computing_sec.values())):
            slowest = max(self.computing_sec, key=self.computing_sec.__getitem__)
            lag = (self.computing_sec[slowest] - statistics.median_low(self.computing_sec.values())) / self.steps
        return {
            "data_wait_share": None if data_wait_rank is None else self.data_wait_sec[data_wait_rank] / self.step_sec,
            "data_wait_rank": data_wait_rank,
            "slowest_rank": slowest,
            "slowest_rank_lag_sec": lag,
        }


def interval_figures(figures: Figures, *, ranks: Sequence[RankShare]) -> dict[str, float | None]:
    """The figures of an interval, by keys that ``docs/records.md`` explains; None where no step counts.

    Args:
        figures: of its steps, on this rank.
        ranks: what each rank adds.
    """
    times = RankTimes()
    times.add(figures, ranks)
    return {
        **times.figures(),
        "steps": figures.steps,
        "tokens_per_sec": figures.tokens_per_sec(),
        "step_time_p50_sec": percentile(figures.step_secs, 0.50),
        "step_time_p95_sec": percentile(figures.step_secs, 0.95),
        "largest_loss": max((rank.loss for rank in ranks if math.isfinite(rank.loss)), default=None),
    }
