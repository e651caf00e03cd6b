"""The records of suites that others read, and what runs and the cells of sweeps have in common.

``sweep.json`` of a sweep, ``inference.json`` of many requests at once, and the record of ``benchmark.py plan``: their
schemas, and how they are read. Readers ignore unknown keys. Unknown values are null, never 0.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from dsgpt.common.errors import UserError, is_number
from dsgpt.common.json_files import JsonError, Positive, clipped, parse_as, read_bytes
from dsgpt.common.text import instruction_words
from dsgpt.config.options import TRAINING_FACTS, WORK_FACTS
from dsgpt.record.runs import Footprint, Run, parts_of_prediction
from dsgpt.record.schema import Fields, later_schema, read_fields
from dsgpt.record.work import Worked, machine

SCHEMA_VERSION = "1.0"
"""Schema of ``sweep.json`` and of ``inference.json``."""
SWEEP_FILE = "sweep.json"
MAX_BYTES = 64 << 20
Kind = Literal["same training", "weak scaling", "precisions"]
"""Facts that the cells of a comparison share. Only ``same training`` is equal work."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """What every record of a suite begins with."""

    schema_version: str
    timestamp_utc: str
    git_commit: str | None
    env: dict[str, Any]
    hardware: dict[str, Any]


H = TypeVar("H", bound=Head)


class State(StrEnum):
    """Outcomes of a turn."""

    DONE = "done"
    REFUSED = "refused"
    """Refused by a check of this program, before training."""
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure of several turns."""

    median: float
    smallest: float
    largest: float
    values: list[float]
    """Values by repeat, without the turns that lack the figure."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One training of a cell. Figures that its record does not have are None."""

    cell: str
    repeat: Positive
    """Number of the repeat, from 1; turns of one repeat ran near each other."""
    place: int
    """Place in the order in which all turns ran, from 1."""
    state: State
    message: str | None
    """Why it is not ``done``: the last line of its log that names an error."""
    seconds: float
    """Seconds from the start of the launcher to its end."""
    train_time_sec: float | None = None
    tokens_per_sec: float | None = None
    """Over all devices; training steps after the warm-up."""
    peak_memory_bytes_rank0: float | None = None
    """Allocated on the GPU of rank 0; on a CPU the resident set of its process."""
    model_state_bytes_by_rank: list[float] | None = None
    """Weights, gradients and optimizer of every rank."""
    sent_bytes_per_step: float | None = None
    """Bytes per step of the rank that sends most, as rings."""
    communication_share: float | None = None
    """Share of a step in which it waits for communication; mean over the ranks. None unless the training measured
    it."""
    joules: float | None = None
    """Energy of all GPUs while the run trained."""
    final_loss: float | None = None
    """Training loss of the last step, nats per token."""
    final_val_loss: float | None = None
    time_to_target_sec: float | None = None
    """Seconds of training steps until a step had the target loss or less."""
    footprint: Footprint | None = None
    work: dict[str, Any] | None = None
    """Facts of the work, by the names of ``dsgpt.config.options``."""


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """A setting and its turns; every figure is of the turns that are done."""

    name: str
    devices: Positive
    launcher: str
    flags: list[str]
    """Flags for ``src/gpt2.py``, as the suite has them."""
    turns: list[Turn]
    """Turns by repeat."""
    tokens_per_sec: Spread | None = None
    tokens_per_sec_per_device: Spread | None = None
    peak_memory_bytes_rank0: Spread | None = None
    model_state_bytes_by_rank: list[float] | None = None
    sent_bytes_per_step: float | None = None
    communication_share: Spread | None = None
    joules: Spread | None = None
    final_loss: float | None = None
    """Final loss of the first turn that is done: all turns compute the same."""
    time_to_target_sec: Spread | None = None
    """Seconds until the target loss; None if a turn that is done did not reach it."""
    cost: Spread | None = None
    """Cost of the training time of all devices, in the unit of the price."""

    @property
    def failures(self) -> list[Turn]:
        """The turns that are not done."""
        return [turn for turn in self.turns if turn.state != State.DONE]

    def done(self) -> dict[int, Turn]:
        """The turns that are done, by repeat."""
        return {turn.repeat: turn for turn in self.turns if turn.state == State.DONE}


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A cell beside the baseline of a comparison."""

    cell: str
    same_work: str
    """The verdict of ``dsgpt.record.equal_work`` on their records, one line."""
    comparable: bool
    """Whether only facts differ in which the comparison allows it; otherwise the figures below are None."""
    speed_up: Spread | None = None
    """Tokens per second, divided by those of the baseline in the same repeat."""
    efficiency: float | None = None
    """Median speed-up, divided by the devices per device of the baseline."""
    loss_difference: float | None = None
    """Final loss minus the baseline's; None unless they are the same training."""
    largest_loss_difference: float | None = None
    """Largest distance of a step's loss from the baseline's at that step in the same repeat; None unless they are the
    same training, and in records made before this field existed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Cells that are compared with one of them."""

    name: str
    kind: Kind
    baseline: str
    cells: list[Compared]


@dataclass(frozen=True, kw_only=True)
class Sweep(Head):
    """The record."""

    suite: str
    seed: int
    """Draws the order of the turns."""
    repeats: int
    limit_sec: float
    """Time limit of a turn."""
    target_loss: float | None
    price_per_device_hour: float | None
    seconds: float
    """Seconds that all turns took."""
    cells: list[SweepCell]
    comparisons: list[Comparison]

    def cell(self, name: str) -> SweepCell:
        """The cell of that name."""
        return next(cell for cell in self.cells if cell.name == name)

    def unequal_tokens(self) -> str:
        """Warning that some cells trained on more tokens than others, which cost more; empty if none did."""
        works = [work for cell in self.cells for turn in cell.done().values() if (work := turn.work)]
        tokens = sorted({count for work in works if is_number(count := work.get("tokens"))})
        if len(tokens) < 2:
            return ""
        return f"not all cells trained on the same number of tokens: {tokens[0]:,.0f} to {tokens[-1]:,.0f}"


def worked(turn: Turn, *, name: str) -> Worked:
    """The work of ``turn`` under a name for messages; facts that it lacks are None."""
    work = turn.work or {}
    return Worked(name, {fact: work.get(fact) for fact in (*WORK_FACTS, *TRAINING_FACTS)})


def read_sweep(path: Path) -> Sweep:
    """Read a record from its file, or from the folder that it is in.

    Raises:
        UserError: it is missing, or not a record of a sweep of this schema; one line.
    """
    return _read(path / SWEEP_FILE if path.is_dir() else path, parse_sweep, "the record of a sweep")


def _read(file: Path, parse: Callable[[bytes], H], what: str) -> H:
    try:
        record = parse(read_bytes(file, max_bytes=MAX_BYTES))
    except JsonError as error:
        raise UserError(f"{file}: cannot be read as {what}: {error}") from error
    if said := later_schema(record.schema_version, SCHEMA_VERSION):
        raise UserError(f"{file}: {said}")
    return record


def parse_sweep(data: bytes) -> Sweep:
    """A record from the text of its file.

    Raises:
        JsonError: it is not a record of a sweep, or it contradicts itself.
    """
    sweep = parse_as(data, Sweep, unknown_keys=True)
    names = [cell.name for cell in sweep.cells]
    if len(set(names)) < len(names):
        raise JsonError("two of its cells have the same name")
    for name in (sweep.suite, *names, *(comparison.name for comparison in sweep.comparisons)):
        if not name.isprintable():
            raise JsonError(f"the name {clipped(name)} has characters that cannot be printed")
    for comparison in sweep.comparisons:
        for name in (comparison.baseline, *(one.cell for one in comparison.cells)):
            if name not in names:
                raise JsonError(f"the comparison {clipped(comparison.name)} is with {clipped(name)}, which is no cell")
    return sweep


# ``inference.json``: the record of many requests at once.

TITLES = {
    "one": "this project, one request at a time",
    "static": "this project, static batches",
    "continuous": "transformers, continuous batching",
    "vllm": "vLLM",
}
"""Titles of engines, by name."""


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Values that half, 95% and 99% of the requests do not exceed; of speeds, that they reach (nearest rank)."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """An engine at one concurrency. Percentiles are of the requests of all repeats."""

    requests: int
    """Number of requests in all repeats."""
    offered_tokens_per_sec: float | None
    """New tokens that were asked for, divided by the time in which their requests arrived; None of one request."""
    tokens_per_sec: Spread
    """New tokens, divided by the time from the first arrival to the last token; a value for each repeat."""
    ttft_sec: Percentiles
    """Seconds from the arrival of a request to its first token."""
    time_per_token_sec: Percentiles | None
    """Mean seconds between two tokens of a request, after its first; None if no request has two."""
    latency_sec: Percentiles
    """Seconds from the arrival of a request to its last token."""
    queue_sec: Percentiles
    """Seconds from the arrival of a request until the engine began to work on it."""
    request_tokens_per_sec: Percentiles
    """New tokens of a request, divided by its latency."""
    peak_memory_bytes: int | None
    """The sum of the engine's processes: resident, or allocated on the GPU by the one that measures."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An answer with other ids than this project's."""

    request: int
    position: int
    """Index of the first new token that differs, from 0."""
    ours: int
    theirs: int
    margin: float
    """Logit of our id minus that of the second likeliest: near 0, rounding decides."""
    answers: int
    """Number of answers to this request that differ there in this way."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine."""

    name: str
    version: str | None
    """Version of its library; None for this project's own."""
    load_sec: float | None
    """Seconds until it could answer; None if it never could."""
    same_ids: int
    """Answers with the ids of this project's, one request at a time."""
    answers: int
    differences: list[Difference]
    by_concurrency: dict[str, Load]
    """Loads by the number of requests at once; without those of which the engine finished no turn."""
    failure: str | None = None
    """Why it stopped answering, one line; None if it did not. Its later turns were left out."""


@dataclass(frozen=True, kw_only=True)
class Concurrency(Head):
    """The record."""

    checkpoint: str
    model: dict[str, Any]
    """The shape."""
    threads: int | None
    """CPU threads of every engine; None on a GPU."""
    trace_sha256: str
    seed: int
    """Seed of the trace."""
    requests: int
    prompt_tokens: int
    """Tokens of the prompts of all requests."""
    new_tokens: int
    repeats: int
    alone_sec: float
    """The mean time of a request that is answered alone by this project."""
    gap_sec: dict[str, float]
    """The mean time between two arrivals, by concurrency."""
    seconds: float
    engines: list[Engine]


def read_concurrency(file: Path) -> Concurrency:
    """Read a record.

    Raises:
        UserError: it is missing, or not such a record of this schema; one line.
    """
    return _read(file, partial(parse_as, kind=Concurrency, unknown_keys=True), "a record of benchmark.py inference")


# What runs and the cells of sweeps have in common for charts.

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Measured:
    """A run or a cell."""

    name: str
    footprint: Footprint
    lacking: str = NOT_RECORDED
    """Words in place of a figure that is missing."""
    group: int = 0
    """Equal for the cells of one strategy, which look alike."""
    sent_bytes_per_step: float | None = None
    """Bytes per step of the rank that sends most, as rings."""
    communication_share: float | None = None
    """Share of a step in which it waits for communication."""


def of_runs(runs: Sequence[Run]) -> list[Measured]:
    """Measurements of each run."""
    costs = [(run.sent_bytes_per_step, run.communication_share) for run in runs]
    return [Measured(run.name, run.footprint, NOT_RECORDED, index, *costs[index]) for index, run in enumerate(runs)]


def of_cells(sweep: Sweep) -> list[Measured]:
    """Measurements of each cell of a sweep: memory of the first turn that is done, and step times of all turns."""
    groups, rows = groups_of(sweep), []
    for cell in sweep.cells:
        footprints = [turn.footprint for turn in cell.done().values() if turn.footprint is not None]
        times = sorted(time for each in footprints for time in each.step_times_sec or ())
        footprint = replace(footprints[0], step_times_sec=times or None) if footprints else Footprint()
        lacking, group = failure(cell) or NOT_RECORDED, groups[strategy_of(cell.name)]
        share = cell.communication_share.median if cell.communication_share else None
        rows.append(Measured(cell.name, footprint, lacking, group, cell.sent_bytes_per_step, share))
    return rows


def strategy_of(cell: str) -> str:
    """The name of a cell without its devices, and without the batch that grows with them."""
    return re.sub(r" on \d+ devices?(?:, batch \d+)?", "", cell)


def groups_of(sweep: Sweep) -> dict[str, int]:
    """The place of every strategy of a sweep, which decides its look in all charts."""
    return {name: place for place, name in enumerate(dict.fromkeys(strategy_of(cell.name) for cell in sweep.cells))}


def failure(cell: SweepCell) -> str:
    """Outcomes of its turns, if none trained to its end; empty if one did."""
    return "" if cell.done() else " and ".join(dict.fromkeys(turn.state for turn in cell.turns)) or "not run"


# The record of ``benchmark.py plan``, predictions beside measurements, as far as charts show it.


@dataclass(frozen=True)
class Predictions:
    """The peaks of memory in the record."""

    rows: tuple[Measured, ...]
    """A cell each; of its ranks, the one that needed most."""
    footer: str
    """Source of the figures, in a line."""


def read_predictions(path: Path) -> Predictions:
    """Read the record.

    Raises:
        UserError: it cannot be read, or has no cells with predictions; one line.
    """
    record = read_fields(path, wanted="a record of benchmark.py plan", notes=[])
    rows = tuple(map(_row, record.sections("cells")))
    if not any(row.footprint.predicted for row in rows):
        raise UserError(f"{path}: holds no predictions beside measurements; give a record of benchmark.py plan")
    date = (record.text("timestamp_utc") or "")[:10] or "without a date"
    sets = instruction_words(record.section("hardware").text("instruction_sets"))
    footer = f"benchmark.py plan: {len(rows)} cells, {date}; machine: {machine(record) or NOT_RECORDED} ({sets})."
    return Predictions(rows, footer)


def _row(cell: Fields) -> Measured:
    ranks = [rank for rank in cell.sections("peak_memory") if rank.number("measured")]
    name = cell.text("title") or cell.text("key") or ""
    if not ranks:
        return Measured(name, Footprint(), cell.text("status") or NOT_RECORDED)
    most = max(ranks, key=lambda rank: rank.number("measured") or 0)
    predicted = parts_of_prediction(most.section("predicted").section("parts"))
    return Measured(name, Footprint(predicted=predicted, peak=most.number("measured"), peak_kind="tensors"))
