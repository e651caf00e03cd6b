"""What every step of a run read, the steps that stand out, and the documents behind them.

The order of the samples is a pure function of the seed and the step. So the record of a run is enough to know what each
of its steps read, and each of its ranks, across resumes on other ranks and with other data. Imports no torch.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dsgpt.common.errors import UserError
from dsgpt.common.files import printable
from dsgpt.data.addresses import Address, Addresses
from dsgpt.data.data_set import Windows, open_data
from dsgpt.data.download import progress
from dsgpt.data.order import RankShare, SampleOrder
from dsgpt.data.token_file import TokenFile
from dsgpt.machine.topology import ParallelSizes, Topology
from dsgpt.record.runs import read_record
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, read_fields, read_steps

# What a step read: its samples, in the data that the run had then.

CONFIG_FILE = "config.json"
"""The settings with which the first process of a run began."""
_SIZES = ("seq_len", "global_batch_size", "total_steps", "seed")
_SPLIT = ("tensor", "pipeline", "sequence")


class Part(NamedTuple):
    """Tokens of a sample that follow each other in one document."""

    file: Addresses
    document: Address
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The steps of a run that read the same data. A resume with ``--allow_changed data`` begins another phase."""

    order: SampleOrder
    windows: Windows
    addresses: Callable[[TokenFile], Addresses]
    """Opens the index of a file of the data, once."""

    def steps(self, steps: range) -> NDArray[np.int64]:
        """The windows of ``steps``, counted from 1; shape (steps, global_batch_size)."""
        return self.order.batches(steps.start - 1, steps.stop - 1)

    def parts(self, window: int) -> Iterator[Part]:
        """What a window has of each document: its inputs, and the target of the last one.

        Raises:
            TokenFileError: a file has no index.
        """
        for token_file, start, tokens in self.windows.spans(window):
            file, stop = self.addresses(token_file), start + tokens
            for number in range(file.number_at(start), file.number_at(stop - 1) + 1):
                document = file[number]
                yield Part(file, document, max(start, document.start), min(stop, document.stop))

    def windows_of(self, part: Part) -> Iterator[int]:
        """The windows that have a token of the document of ``part``, as an input or as a target."""
        begin, length = 0, self.windows.seq_length
        for source, end in zip(self.windows.data.sources, self.windows.ends, strict=True):
            before = 0
            for file in source.files:
                if file.path == part.file.file.path:
                    first, last = before + part.document.start - 1, before + part.document.stop - 1
                    yield from range(begin + max(0, first) // length, min(begin + last // length + 1, end))
                before += file.tokens
            begin = end


class Reading:
    """What a run read. Steps are counted from 1.

    Args:
        run_dir: the folder of the run.
        data: its training data, if that is no longer where the run read it.

    Raises:
        UserError: the record cannot be read, or lacks what decides the samples.
    """

    def __init__(self, run_dir: Path, *, data: Path | None = None) -> None:
        notes: list[str] = []
        self.run_dir = run_dir
        self._record = read_record(run_dir / RECORD_FILE, name=printable(run_dir.name), notes=notes)
        config, facts = self._record.section("training_config"), [self._record.section("data")]
        sizes = [size for name in _SIZES if (size := config.whole(name)) is not None]
        if len(sizes) < len(_SIZES) or 0 in sizes[:-1]:
            raise UserError(f"{run_dir / RECORD_FILE}: does not say what a step read: it needs {', '.join(_SIZES)}")
        self.seq_length, self.global_batch_size, self.total_steps, self._seed = sizes
        if (run_dir / CONFIG_FILE).exists():  # with the data of the first steps
            facts.append(read_fields(run_dir / CONFIG_FILE, wanted=f"a {CONFIG_FILE}", notes=notes).section("data"))
        named = [Path(path) for each in facts if (path := each.text("train_path")) and "\0" not in path]
        self._paths = [data] if data else [*dict.fromkeys(named)]
        changes = [each for each in self._record.sections("changed_at_resume") if each.text("name") == "train data"]
        ends = [*(each.whole("step") or 0 for each in changes), self.total_steps]
        hashes = [*(each.text("before") for each in changes), facts[0].text("train_sha256")]
        self.phases = tuple(zip([1, *(end + 1 for end in ends)], ends, hashes, strict=False))
        """First step, last step and the SHA-256 of the data of each phase."""
        self._opened = cache(self._open)

    @cached_property
    def taken(self) -> int:
        """The last step that is recorded as taken; 0 if none is."""
        steps = [each.whole("last_step") or 0 for each in self._record.sections("segments")]
        with contextlib.suppress(OSError):  # the file may not be there
            steps += [line["step"] for line in read_steps(self.run_dir / STEPS_FILE)]
        return max(steps, default=0)

    def phase(self, step: int) -> Phase:
        """The phase that ``step`` belongs to.

        Raises:
            UserError: the run has no such step; or its data is not there.
        """
        for first, last, sha256 in self.phases:
            if first <= step <= last:
                return self._opened(first, last, sha256)
        raise UserError(f"--step {step}: the run {self.run_dir} has the steps 1 to {self.total_steps:,}")

    def _open(self, first: int, last: int, sha256: str | None) -> Phase:
        reasons: list[str] = []
        for path in self._paths:
            try:
                data = open_data(path, flag=f"the data of {self.run_dir}:")
            except UserError as error:
                reasons += error.problems
                continue
            order = data.order(self.seq_length, global_batch_size=self.global_batch_size, seed=self._seed)
            same = sha256 is not None and data.sha256(lambda file: file.sidecar.sha256, mixed=True) == sha256
            if same and order.steps_per_epoch:
                return Phase(order=order, windows=Windows(data, self.seq_length), addresses=cache(Addresses))
            reasons.append(f"{path}: is not what the steps {first:,} to {last:,} read, whose sha256 is {sha256}")
        cure = "call this from the folder where the run began, or name the data"
        raise UserError(*(f"{reason}; {cure}" for reason in reasons or [f"{self.run_dir}: names no training data"]))

    def share(self, step: int, rank: int) -> NDArray[np.int64]:
        """The places in the global batch of ``step`` that ``rank`` read, (gradient_accumulation_steps, micro batch).

        Raises:
            UserError: the process that executed the step had no such rank, or the record does not say.
        """
        executed = self._record.section("")  # without any field
        for each in self._record.sections("segments"):
            executed = each if (each.whole("first_step") or step + 1) <= step else executed
        keys = (*(f"{way}_parallel_size" for way in _SPLIT), "micro_batch_size_per_gpu", "grad_accum_steps")
        *sizes, micro, accumulation = [executed.whole(key) or 0 for key in keys]
        ranks = executed.section("hardware").whole("world_size")
        if not (ranks and all(sizes) and micro and accumulation):
            raise UserError(f"--rank {rank}: the record does not say which ranks executed step {step:,}")
        if rank >= ranks:
            raise UserError(f"--rank {rank}: step {step:,} was executed by the ranks 0 to {ranks - 1}")
        split = ParallelSizes(**dict(zip(_SPLIT, sizes, strict=True)))
        here = Topology(rank=rank, world_size=ranks, sizes=split, local_rank=0, local_world_size=ranks, launcher="")
        return RankShare(
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            data_rank=here.data_rank,
            data_parallel_size=here.data_parallel_size,
        ).of(np.arange(self.global_batch_size))


# The steps that stand out.

TRAILING = 32
"""Recorded values before a step with which it is compared."""
DEVIATIONS = 6.0
"""From so many deviations on a step stands out. Of independent normally distributed values, one in 34,000 would (235 of
eight million that were drawn): the deviation of 32 values is itself a rough estimate."""
FIGURES = {"loss": "loss", "grad_norm": "gradient norm"}
"""Keys of ``metrics.jsonl`` that are judged, and their names. The loss is in nats per token; a norm has no unit."""


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A step that stands out."""

    step: int
    values: dict[str, tuple[float, float, float]]
    """By key of ``FIGURES``, those that stand out: the value, the median before it, and how many deviations above."""

    @property
    def words(self) -> str:
        """``loss 7.21 (median 3.1, 25 deviations above)``."""
        return "; ".join(
            f"{FIGURES[key]} {now:.4g} (median {median:.4g}, {far:.3g} deviations above)"
            if math.isfinite(now)
            else f"{FIGURES[key]} not finite (median {median:.4g})"
            for key, (now, median, far) in self.values.items()
        )


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """The steps of a run, judged.

    A step stands out if its loss or its gradient norm is ``DEVIATIONS`` deviations or more above the median of the
    ``TRAILING`` recorded values before it. A deviation is 1.4826 times the median distance of these values from their
    median: for normally distributed values this is their standard deviation, and outliers among them hardly change it.
    It is at least a millionth of the median. Values below the median never stand out.

    A value that is not finite is null in the file. It stands out, and the steps behind it are left out: it ended the
    training. The norm of a step that fp16 loss scaling skipped does not count.
    """

    spikes: tuple[Spike, ...]
    judged: tuple[int, ...]
    """The steps with a value that has ``TRAILING`` recorded ones before it."""
    steps: int
    """Steps that are recorded."""

    @property
    def words(self) -> str:
        """``3 of 268 steps stand out; 32 more cannot be judged: fewer than 32 values are recorded before them``."""
        lost = self.steps - len(self.judged)
        more = f"; {lost:,} more cannot be judged: fewer than {TRAILING} values are recorded before them"
        return f"{len(self.spikes):,} of {len(self.judged):,} steps stand out{more if lost else ''}"


def find_spikes(run_dir: Path) -> Spikes:
    """Judge the steps in the ``metrics.jsonl`` of a run.

    Raises:
        UserError: it cannot be read.
    """
    path = run_dir / STEPS_FILE
    try:
        lines = {line["step"]: line for line in read_steps(path) if "loss" in line}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    ends = [step for step, line in lines.items() if math.inf in {_value(line, key) for key in FIGURES}]
    lines = {step: lines[step] for step in sorted(lines) if step <= min(ends, default=step)}
    found: dict[int, dict[str, tuple[float, float, float]]] = defaultdict(dict)
    judged = set[int]()
    for key in FIGURES:
        recorded = np.array([(step, value) for step, line in lines.items() if (value := _value(line, key)) is not None])
        if len(recorded) > TRAILING:
            before = sliding_window_view(recorded[:, 1], TRAILING)[:-1]
            medians = np.median(before, axis=1)
            scale = 1.4826 * np.median(np.abs(before - medians[:, None]), axis=1)
            scale = np.maximum(scale, 1e-6 * np.abs(medians) + 1e-300)
            for (step, value), median, one in zip(
                recorded[TRAILING:].tolist(), medians.tolist(), scale.tolist(), strict=True
            ):
                judged.add(int(step))
                if value >= median + DEVIATIONS * one:
                    found[int(step)][key] = value, median, (value - median) / one
    spikes = tuple(Spike(step=step, values=found[step]) for step in sorted(found))
    return Spikes(spikes=spikes, judged=tuple(sorted(judged)), steps=len(lines))


def _value(line: dict[str, Any], key: str) -> float | None:
    """A figure of a step; infinite if it was not finite, None if it does not count or is unknown."""
    value: float | None = line.get(key)
    if key == "grad_norm" and line.get("skipped") is not False:
        return None if line.get("skipped") else value
    return math.inf if value is None and key in line else value


# The documents behind them: those that are rare among the calm steps.

_STEPS_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A document that steps which stand out have read."""

    file: Addresses
    document: Address
    spikes: tuple[int, ...]
    """The steps among them that read it."""
    steps: int
    """Judged steps that read it."""
    by_chance: float
    """How many of the documents read by steps that stand out would have as many of them if chance had dealt them out.

    The probability that, of as many steps as stand out, drawn from all judged ones, at least ``len(spikes)`` are among
    the ``steps`` (hypergeometric distribution), times the number of these documents (Bonferroni).
    """


def suspects(reading: Reading, judged: Spikes) -> list[Suspect]:
    """The documents that the steps which stand out have read, the least likely by chance first.

    Of equally likely ones, those whose steps stand out most. A document that was read once cannot be told from the
    others of its step: the list has it, and ``by_chance`` says so. A step may stand out for other reasons, such as its
    learning rate; then no document is unlikely.

    Raises:
        UserError: as ``Reading.phase``.
    """
    height = {spike.step: max(far for _, _, far in spike.values.values()) for spike in judged.spikes}
    found: list[Suspect] = []
    for first, last, _ in reading.phases:
        steps = [step for step in judged.judged if first <= step <= last]
        if spikes := height.keys() & steps:
            found += _suspects(reading.phase(first), steps, spikes)
    return sorted(found, key=lambda each: (each.by_chance, -sum(map(height.__getitem__, each.spikes))))


def _suspects(phase: Phase, steps: Sequence[int], spikes: set[int]) -> list[Suspect]:
    """The documents of the ``spikes``, which are among ``steps``."""
    windows = (window for step in spikes for window in phase.steps(range(step, step + 1))[0].tolist())
    documents = {(part.file, part.document.number): part for window in windows for part in phase.parts(window)}
    in_window: dict[int, list[tuple[Addresses, int]]] = defaultdict(list)
    for key, part in documents.items():
        for window in phase.windows_of(part):
            in_window[window].append(key)
    wanted, judged, read_by = np.array(sorted(in_window)), set(steps), {key: set[int]() for key in documents}
    with progress(total=steps[-1] + 1 - steps[0], description="reading the order", unit=" steps") as bar:
        for first in range(steps[0], steps[-1] + 1, _STEPS_AT_ONCE):
            some = range(first, min(first + _STEPS_AT_ONCE, steps[-1] + 1))
            windows_read = phase.steps(some)
            for row, column in np.argwhere(np.isin(windows_read, wanted)):
                for key in in_window[int(windows_read[row, column])]:
                    read_by[key].add(some[row])
            bar.update(len(some))

    @cache
    def chance(hits: int, read: int) -> float:
        """Probability of at least ``hits`` among as many drawn steps as stand out, of a document in ``read`` steps."""
        total, out = len(steps), len(spikes)
        ways = ((read, n, total - read, out - n) for n in range(max(hits, read + out - total), min(read, out) + 1))
        return sum(math.exp(_ways(a, b) + _ways(c, d) - _ways(total, out)) for a, b, c, d in ways)

    found = []
    for key, part in documents.items():
        hits, read = tuple(sorted(spikes & read_by[key])), len(judged & read_by[key])
        by_chance = chance(len(hits), read) * len(documents)
        found.append(Suspect(file=part.file, document=part.document, spikes=hits, steps=read, by_chance=by_chance))
    return found


def _ways(total: int, chosen: int) -> float:
    """The logarithm of the binomial coefficient."""
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
