"""What every step of a run read, the steps that stand out, the documents behind them, and the command that prints them.

The order of the samples is a pure function of the seed and the step. So the record of a run is enough to know what each
of its steps read, and each of its ranks, across resumes on other ranks and with other data. Imports no torch.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from dsgpt.common.command_line import COUNT, POSITIVE, flag, read_options
from dsgpt.common.errors import UserError
from dsgpt.common.files import printable
from dsgpt.common.json_files import clipped_text
from dsgpt.common.text import counted, next_line, script_words
from dsgpt.data.addresses import Address, Addresses, changed_sources
from dsgpt.data.data_set import Windows, open_data
from dsgpt.data.download import progress
from dsgpt.data.order import RankShare, SampleOrder
from dsgpt.data.token_file import TokenFile, open_token_file
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
        segments = self._record.sections("segments")
        executed = [each for each in segments if (each.whole("first_step") or step + 1) <= step]
        keys = (*(f"{way}_parallel_size" for way in _SPLIT), "micro_batch_size_per_gpu", "grad_accum_steps")
        numbers = [executed[-1].whole(key) for key in keys] if executed else []
        ranks = executed[-1].section("hardware").whole("world_size") if executed else None
        *sizes, micro, accumulation = [number or 0 for number in numbers] or [0, 0]
        if not (ranks and all(sizes) and micro and accumulation):
            raise UserError(f"--rank {rank}: the record does not say which ranks executed step {step:,}")
        if rank >= ranks:
            raise UserError(f"--rank {rank}: step {step:,} was executed by the ranks 0 to {ranks - 1}")
        split = ParallelSizes(**dict(zip(_SPLIT, sizes, strict=True)))
        here = Topology(rank=rank, world_size=ranks, sizes=split, local_rank=0, local_world_size=ranks, launcher="")
        share = RankShare(
            micro_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            data_rank=here.data_rank,
            data_parallel_size=here.data_parallel_size,
        )
        return share.of(np.arange(self.global_batch_size))


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
        figures = ((FIGURES[key], *values) for key, values in self.values.items())
        return "; ".join(
            f"{name} {now:.4g} (median {median:.4g}, {far:.3g} deviations above)"
            if math.isfinite(now)
            else f"{name} not finite (median {median:.4g})"
            for name, now, median, far in figures
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
            figures = np.column_stack([recorded[TRAILING:], medians, scale])
            for step, value, median, one in figures.tolist():
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
        total, out = len(steps), len(spikes)
        ways = ((read, n, total - read, out - n) for n in range(max(hits, read + out - total), min(read, out) + 1))
        return sum(math.exp(_ways(a, b) + _ways(c, d) - _ways(total, out)) for a, b, c, d in ways)

    found = []
    for key, part in documents.items():
        hits, read = spikes & read_by[key], len(judged & read_by[key])
        by_chance, spiky = chance(len(hits), read) * len(documents), tuple(sorted(hits))
        found.append(Suspect(file=part.file, document=part.document, spikes=spiky, steps=read, by_chance=by_chance))
    return found


def _ways(total: int, chosen: int) -> float:
    """The logarithm of the binomial coefficient."""
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


# The command line of ``data_prep/where.py``: the documents behind a token, a step, or the spikes of a run.

DESCRIPTION = """\
Print where tokens come from: the document, its source file, its place there, its tokens and the beginning of its text.
The place is a byte offset or a row; the hash is the first 8 bytes of the SHA-256 of the text. Of a token file: a
document, or the one that a token belongs to. Of a run: the documents that a step read, or those behind the steps
whose loss or gradient norm stands out. Tokens, documents, samples and ranks are counted from 0, steps from 1."""
_SCRIPT = "data_prep/where.py"


@dataclass(frozen=True, kw_only=True)
class WhereOptions:
    """The command line; ``DESCRIPTION`` says what it does.

    Examples:
      .venv/bin/python data_prep/where.py data/python-transformers/train.bin --token 150000
      .venv/bin/python data_prep/where.py --run checkpoint/run --step 812 --rank 3
      .venv/bin/python data_prep/where.py --spike checkpoint/run
    """

    file: Path | None = flag(Path, "BIN", name="file", nargs="?")
    """a token file; with --run and --spike the training data, if it is no longer where the run read it"""
    token: int | None = flag(COUNT, "N", "the document that token N of BIN belongs to")
    document: int | None = flag(COUNT, "N", "document N of BIN")
    run: Path | None = flag(Path, "RUN", "the folder of a run, for the documents that its --step read")
    step: int | None = flag(POSITIVE, "N", "an optimizer step of --run")
    rank: int | None = flag(COUNT, "N", "only the share of this rank; by default the whole global batch")
    spike: Path | None = flag(Path, "RUN")
    """the steps of this run that stand out, and their documents, the least likely by chance first"""
    top: int = flag(POSITIVE, "N", "documents that --spike prints (default %(default)s)", default=10)


def main(argv: Sequence[str] | None = None) -> None:
    """Print what the command line asks for.

    Raises:
        UserError: mistakes of the command line; or the run, its token file or the index cannot be used.
    """
    options, problems = read_options(WhereOptions, argv, description=DESCRIPTION)
    asked = [name for name in ("token", "document", "run", "spike") if getattr(options, name) is not None]
    if len(asked) != 1:
        problems.add("give one of BIN --token N, BIN --document N, --run RUN --step N, and --spike RUN")
    if asked in (["token"], ["document"]) and options.file is None:
        problems.add(f"--{asked[0]}: name the token file, too")
    if (options.step is None) != (options.run is None):
        problems.add("--run and --step go together: give both")
    if options.rank is not None and options.run is None:
        problems.add("--rank: only --run has ranks; leave it out")
    problems.raise_if_any()
    if options.run is not None and options.step is not None:
        _print_step(Reading(options.run, data=options.file), options.step, rank=options.rank)
    elif options.spike is not None:
        _print_spikes(Reading(options.spike, data=options.file), top=options.top)
    elif options.file is not None:
        _print_document(Addresses(open_token_file(options.file)), token=options.token, number=options.document)


EXCERPT_TOKENS, EXCERPT = 48, 100
"""Tokens that are decoded for an excerpt, and characters that are shown of it."""


def excerpt(file: Addresses, start: int, stop: int) -> str:
    """The beginning of the text of a range of tokens, on one line."""
    return clipped_text(printable(file.text(start, min(stop, start + EXCERPT_TOKENS))), width=EXCERPT)


def _end(files: Iterable[TokenFile], *words: object) -> None:
    """Print the last lines: sources that changed, and the next command."""
    for line in filter(None, map(changed_sources, files)):
        print(f"warning: {line}")
    print(next_line(script_words(_SCRIPT, *words)))


def _print_document(file: Addresses, *, token: int | None, number: int | None) -> None:
    number = file.number_at(token or 0) if number is None else number
    document = file[number]
    print(f"{file.file.path}: document {number:,} of {len(file):,}")
    print(f"  source  {document.origin}")
    print(f"  tokens  {document.start:,} to {document.stop - 1:,}; the last is the end-of-text id")
    print(f"  hash    {document.hex}: {file.agreement(document)}")
    if token is not None:
        after = excerpt(file, token + 1, document.stop)
        print(f"  token   {token:,}: {file.text(token, token + 1)!r}, then {after}")
    print(f"  text    {excerpt(file, document.start, document.stop)}")
    _end([file.file], file.file.path, "--document", (number + 1) % len(file))


def _print_step(reading: Reading, step: int, *, rank: int | None) -> None:
    phase = reading.phase(step)
    windows = phase.steps(range(step, step + 1))[0].tolist()
    places = np.arange(len(windows))[None] if rank is None else reading.share(step, rank)
    micros = enumerate(places.tolist())
    samples = [(micro, place, [*phase.parts(windows[place])]) for micro, row in micros for place in row]
    epoch, before = divmod(step - 1, phase.order.steps_per_epoch)
    print(
        f"{reading.run_dir}: step {step:,}, which is step {before + 1:,} of {phase.order.steps_per_epoch:,} of epoch "
        f"{epoch + 1}; {'' if rank is None else f'rank {rank} reads '}{counted(len(samples), 'sample')} of "
        f"{reading.seq_length:,} tokens"
    )
    for micro, place, parts in samples:
        spans = phase.windows.spans(windows[place])
        tokens = " and ".join(f"{at:,} to {at + count - 1:,} of {file.path}" for file, at, count in spans)
        print(f"sample {place}{'' if rank is None else f', micro batch {micro}'}: tokens {tokens}")
        for file, document, start, stop in parts:
            print(f"  document {document.number:,}: {document.origin}, {document.hex}: {excerpt(file, start, stop)}")
    _end(phase.windows.data.files, "--spike", reading.run_dir)


def _print_spikes(reading: Reading, *, top: int) -> None:
    judged = find_spikes(reading.run_dir)
    print(f"{reading.run_dir}: {judged.words}")
    for spike in judged.spikes:
        print(f"  step {spike.step:,}: {spike.words}")
    found = suspects(reading, judged)
    if not found:
        return
    print(f"{counted(len(found), 'document')} behind them; those that chance explains least:")
    for each in found[:top]:
        text = excerpt(each.file, each.document.start, each.document.stop)
        share = f"{len(each.spikes)} of the {counted(each.steps, 'step')} that read it, by chance {each.by_chance:.2g}"
        print(f"  {share}: document {each.document.number:,}: {each.document.origin}, {each.document.hex}: {text}")
    if found[0].by_chance > 0.05:
        print("none of them stands out: by chance alone, as many documents would look like these")
    files = {each.file.file.path: each.file.file for each in found}
    _end(files.values(), "--run", reading.run_dir, "--step", found[0].spikes[0])
