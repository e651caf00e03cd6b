"""The records of ``benchmark.py inference`` and ``benchmark.py plan``, as far as others read them.

``inference.json``, the record of many requests at once: its schema, and how it is read. Readers ignore unknown keys.
Unknown values are null, never 0.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import JsonError, parse_as, read_bytes
from dsgpt.common.text import instruction_words
from dsgpt.record.fields import Fields, read_object
from dsgpt.record.runs import Footprint, parts_of_prediction
from dsgpt.record.schema import later_schema
from dsgpt.record.sweeps import NOT_RECORDED, Measured, Spread
from dsgpt.record.work import machine

SCHEMA_VERSION = "1.0"
MAX_BYTES = 64 << 20
TITLES = {
    "one": "this project, one request at a time",
    "static": "this project, static batches",
    "continuous": "transformers, continuous batching",
    "vllm": "vLLM",
}
"""Of engines, by name."""


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """What half, 95% and 99% of the requests do not exceed; of speeds, what they reach at least (nearest rank)."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """An engine at one concurrency. Percentiles are of the requests of all repeats."""

    requests: int
    """Of all repeats."""
    offered_tokens_per_sec: float | None
    """New tokens that were asked for, divided by the time in which their requests arrived; None of one request."""
    tokens_per_sec: Spread
    """New tokens, divided by the time from the first arrival to the last token; a value for each repeat."""
    ttft_sec: Percentiles
    """From the arrival of a request to its first token."""
    time_per_token_sec: Percentiles | None
    """Between two tokens of a request in the mean, after its first; None if no request has two."""
    latency_sec: Percentiles
    """From the arrival of a request to its last token."""
    queue_sec: Percentiles
    """From the arrival of a request until the engine began to work on it."""
    request_tokens_per_sec: Percentiles
    """New tokens of a request, divided by its latency."""
    peak_memory_bytes: int | None
    """The sum of the engine's processes: resident, or allocated on the GPU by the one that measures."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An answer with other ids than this project's."""

    request: int
    position: int
    """Of the first new token that differs, from 0."""
    ours: int
    theirs: int
    margin: float
    """By how much the logit of our id exceeds that of the second likeliest: near 0, rounding decides."""
    answers: int
    """How many answers to this request differ there in this way."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine."""

    name: str
    version: str | None
    """Of its library; None for this project's own."""
    load_sec: float | None
    """Seconds until it could answer; None if it never could."""
    same_ids: int
    """Answers with the ids of this project's, one request at a time."""
    answers: int
    differences: list[Difference]
    by_concurrency: dict[str, Load]
    """By the number of requests that are worked on at once; without those of which it finished no turn."""
    failure: str | None = None
    """Why it stopped answering, one line; None if it did not. Its later turns were left out."""


@dataclass(frozen=True, kw_only=True)
class Concurrency:
    """The record."""

    schema_version: str
    timestamp_utc: str
    git_commit: str | None
    env: dict[str, Any]
    hardware: dict[str, Any]
    checkpoint: str
    model: dict[str, Any]
    """The shape."""
    threads: int | None
    """Of every engine; None on a GPU."""
    trace_sha256: str
    seed: int
    """Of the trace."""
    requests: int
    prompt_tokens: int
    """Of all requests."""
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
    try:
        record = parse_as(read_bytes(file, max_bytes=MAX_BYTES), Concurrency, unknown_keys=True)
    except JsonError as error:
        raise UserError(f"{file}: cannot be read as a record of benchmark.py inference: {error}") from error
    if said := later_schema(record.schema_version, SCHEMA_VERSION):
        raise UserError(f"{file}: {said}")
    return record


# The record of ``benchmark.py plan``, predictions beside measurements, as far as charts show it.


@dataclass(frozen=True)
class Predictions:
    """The peaks of memory in the record."""

    rows: tuple[Measured, ...]
    """A cell each; of its ranks, the one that needed most."""
    footer: str
    """What the record is, in a line."""


def read_predictions(path: Path) -> Predictions:
    """Read the record.

    Raises:
        UserError: it cannot be read, or has no cells with predictions; one line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file; give a record of benchmark.py plan") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    record = Fields(read_object(text, source=str(path), notes=[]), notes=[])
    rows = tuple(_row(cell) for cell in record.sections("cells"))
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
