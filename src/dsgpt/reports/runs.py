"""A training run for the charts, read from either generation of training_metrics.json."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.reports.curves import Curve, epoch_curve, read_step_curves, read_step_times
from dsgpt.reports.epochs import FLAT_KEYS, Epochs, first, last, lowest, mean, total
from dsgpt.reports.fields import Fields, read_object
from dsgpt.reports.footprint import Footprint, read_footprint
from dsgpt.reports.segments import (
    DEVICES,
    HARDWARE,
    INSTRUCTIONS,
    STRATEGY,
    Segment,
    differences,
    only_last_process_recorded,
    read_segments,
    setup_over_time,
)
from dsgpt.reports.work_facts import EXECUTED_BY, read_work
from dsgpt.telemetry.record import later_schema

RECORD_NAME, LOG_NAME = "training_metrics.json", "metrics.jsonl"
FLAT_SCHEMA = "flat keys"
Numbers = dict[str, float | None]
TIMED_FROM_STEP = 4
"""Throughput starts at this step; those before are warm-up (``WARM_UP_STEPS`` in ``telemetry/meter.py``)."""
TOO_SHORT = f"fewer than {TIMED_FROM_STEP} steps"


@dataclass(frozen=True)
class Run:
    """All that the charts use of a run. None means unknown, never zero."""

    name: str
    schema: str
    """The record's ``schema_version``; ``FLAT_SCHEMA`` for the older generation, which has none."""
    status: str | None
    date: str | None
    """When its last process began, in UTC: ``2026-11-22``."""
    machine: str | None
    """The hardware; if segments used several, which steps ran on which. The same holds for the next three fields."""
    instruction_sets: str | None
    devices: str | None
    strategy: str | None
    device_count: float | None
    """Of all its machines; None if segments used different numbers."""
    segments: tuple[Segment, ...]
    """One per process of the run; at least one."""
    work: Mapping[str, Any]
    """What was computed, by fact; the facts are those of ``dsgpt.config.same_work``."""
    resumed: bool
    """Whether the record names a checkpoint from which the run was resumed."""
    epochs: int
    """Number of epochs with a recorded loss."""
    train_time: float | None
    """Seconds of training steps."""
    tokens_per_sec: float | None
    """Tokens per second over all devices, training steps only."""
    final_train_loss: float | None
    best_train_loss: float | None
    """Lowest mean of an epoch, nats per token."""
    final_val_loss: float | None
    best_val_loss: float | None
    inference_latency: float | None
    """Seconds to generate ``new_tokens`` tokens, batch 1."""
    latency_range: tuple[float, float] | None
    """Of its repetitions; None if there was one, or if the record does not say."""
    inference_tokens_per_sec: float | None
    prompt_tokens: float | None
    new_tokens: float | None
    gpu_memory: float | None
    """Peak bytes allocated by PyTorch on rank 0's GPU."""
    gpu_memory_reserved: float | None
    """Peak bytes reserved by PyTorch's allocator on rank 0's GPU."""
    host_memory: float | None
    """Peak resident set size of rank 0's process, bytes."""
    footprint: Footprint
    sent_bytes_per_step: float | None
    """By the rank that sends most, as rings."""
    communication_share: float | None
    """Of a step, in which it waits for communication."""
    train_curve: Curve
    val_curve: Curve
    notes: tuple[str, ...]
    """Remarks on this record, for comparison.md."""

    @property
    def later_schema(self) -> str:
        """A remark on a record of a later version; empty for others."""
        return later_schema(None if self.schema == FLAT_SCHEMA else self.schema)

    @property
    def too_short_to_time(self) -> bool:
        """Whether there is no throughput because all steps were warm-up."""
        steps = self.work["optimizer steps"]
        return self.tokens_per_sec is None and steps is not None and steps < TIMED_FROM_STEP


def read_run(path: Path, *, name: str) -> Run:
    """Read a run from its folder or its ``training_metrics.json``, and the ``metrics.jsonl`` beside it.

    Raises:
        UserError: the file is missing, unreadable, not JSON or not a training record; one line.
    """
    if path.is_dir():
        path = path / RECORD_NAME
    notes: list[str] = []
    record = read_record(path, name=name, notes=notes)
    return run_of(record, name=name, log=path.with_name(LOG_NAME), notes=notes)


def read_record(path: Path, *, name: str, notes: list[str]) -> Fields:
    """Read a ``training_metrics.json`` of the run ``name``; ``notes`` receives remarks on its values.

    Raises:
        UserError: as ``read_run``.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(_missing(path, name)) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file; give a {RECORD_NAME}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    values = read_object(text, source=str(path), notes=notes)
    if not {"schema_version", "training_config", "summary", "epochs", *FLAT_KEYS} & values.keys():
        raise UserError(f"{path}: holds none of a training record's keys; give a {RECORD_NAME}")
    return Fields(values, notes=notes)


def _changes(record: Fields) -> list[dict[str, Any]]:
    """What changed when the run was resumed, as objects with name, step, before and after."""
    changes = record.raw("changed_at_resume")
    return [change for change in changes if isinstance(change, dict)] if isinstance(changes, list) else []


def _strategy_changes(record: Fields) -> Iterator[str]:
    """A note for each change of strategy or ranks, from records without segments."""
    for change in _changes(record):
        if change.get("name") == EXECUTED_BY and not record.sections("segments"):
            after, step, before = (str(change.get(key))[:80] for key in ("after", "step", "before"))
            yield f"times are of two strategies: {after} after step {step}, {before} before"


def _validation_changes(record: Fields) -> Iterator[str]:
    """A note for each change of the validation set: losses before and after it cannot be compared."""
    for change in _changes(record):
        if change.get("name") in ("validation data", "validation windows"):
            name, step = change["name"], str(change.get("step"))[:80]
            yield f"validation losses are of two sets: the {name} changed after step {step}"


def _missing(path: Path, name: str) -> str:
    """The message about a missing record."""
    if path.with_name(LOG_NAME).exists():
        return f"{path}: no such file; the run {name!r} was cut off before its first record: continue it with --resume"
    return f"{path}: no such file; has the run {name!r} started?"


def run_of(record: Fields, *, name: str, log: Path | None, notes: list[str]) -> Run:
    """The run of a record.

    Args:
        record: as ``read_record`` returns it.
        name: of the run.
        log: its ``metrics.jsonl``. Without it the losses are those of epochs, and there are no times of steps.
        notes: with the remarks so far.
    """
    summary = record.section("summary")
    epochs = Epochs(record, notes=notes)
    train_curve, val_curve = _curves(log, epochs, notes)
    peaks = _peaks(record, notes=notes)
    if record.raw("resumed_from") is not None:
        notes.append(f"resumed from {str(record.raw('resumed_from'))[:80]}")
    segments = read_segments(record)
    other_sets = list(_validation_changes(record))
    notes.extend([*_strategy_changes(record), *differences(segments, noted=True), *other_sets])
    val_losses = [] if other_sets else epochs.val_losses  # losses of earlier epochs may be of the other set
    return Run(
        name=name,
        schema=_schema(record),
        status=record.text("status"),
        date=(record.text("timestamp_utc") or "")[:10] or None,
        machine=setup_over_time(segments, HARDWARE),
        instruction_sets=setup_over_time(segments, INSTRUCTIONS),
        devices=setup_over_time(segments, DEVICES),
        strategy=setup_over_time(segments, STRATEGY),
        device_count=record.section("hardware").number("world_size"),
        segments=segments,
        resumed=record.raw("resumed_from") is not None,
        work=_work(record, summary, epochs),
        epochs=epochs.count,
        train_time=first(summary.number("train_time_sec"), epochs.train_time),
        tokens_per_sec=first(summary.number("mean_tokens_per_sec_global"), epochs.throughput),
        **_losses(summary, epochs.train_losses, val_losses),
        **_inference(record, notes=notes),
        latency_range=_latency_range(record.section("inference")),
        **peaks,
        footprint=_footprint(record, peaks, log),
        sent_bytes_per_step=record.section("cost").section("communication_per_step").number("ring_bytes_per_rank"),
        communication_share=summary.number("communication_share"),
        train_curve=train_curve,
        val_curve=val_curve,
        notes=tuple(dict.fromkeys(notes)),
    )


def _work(record: Fields, summary: Fields, epochs: Epochs) -> Mapping[str, Any]:
    return read_work(
        record,
        steps=first(summary.number("optimizer_steps"), total(epochs.steps)),
        tokens=first(summary.number("tokens_processed_global"), total(epochs.tokens)),
    )


def _footprint(record: Fields, peaks: Numbers, log: Path | None) -> Footprint:
    times = () if log is None else read_step_times(log)
    return read_footprint(record, gpu_memory=peaks["gpu_memory"], host_memory=peaks["host_memory"], step_times=times)


def _curves(log: Path | None, epochs: Epochs, notes: list[str]) -> tuple[Curve, Curve]:
    train, validation = (Curve(), Curve()) if log is None else read_step_curves(log, notes)
    if not train.points:
        train = epoch_curve(epochs.train_losses, steps=epochs.steps, times=epochs.times, tokens=epochs.tokens)
    if not validation.points:
        validation = epoch_curve(epochs.val_losses, steps=epochs.steps, times=epochs.times, tokens=epochs.tokens)
    return train, validation


def _schema(record: Fields) -> str:
    version = record.raw("schema_version")
    return FLAT_SCHEMA if version is None else str(version)[:20]


def _losses(summary: Fields, train_losses: list[float | None], val_losses: list[float | None]) -> Numbers:
    """The final and the best losses; the arguments are those of the epochs."""
    return {
        "final_train_loss": first(summary.number("final_train_loss"), last(train_losses)),
        "best_train_loss": lowest(train_losses),
        "final_val_loss": first(summary.number("final_val_loss"), last(val_losses)),
        "best_val_loss": first(summary.number("best_val_loss"), lowest(val_losses)),
    }


def _inference(record: Fields, *, notes: list[str]) -> Numbers:
    """The ``inference`` section, or else the flat keys, whose latency is for 100 new tokens by definition."""
    inference = record.section("inference")
    latency, throughput = inference.number("latency_sec"), inference.number("tokens_per_sec")
    if latency is not None or throughput is not None:
        new_tokens = inference.number("new_tokens")
    else:
        latency, throughput = (mean(record.series(key)) for key in FLAT_KEYS[4:])
        new_tokens = None if latency is None else 100.0
        if latency is not None and record.raw("schema_version") is None:
            notes.append("inference_latency of the older generation is taken as seconds for 100 new tokens")
    return {
        "inference_latency": latency,
        "inference_tokens_per_sec": throughput,
        "prompt_tokens": inference.number("prompt_tokens"),
        "new_tokens": new_tokens,
    }


def _latency_range(inference: Fields) -> tuple[float, float] | None:
    low, high = inference.number("latency_min_sec"), inference.number("latency_max_sec")
    several = (inference.number("repetitions") or 0) > 1
    return (low, high) if several and low is not None and high is not None else None


def _peaks(record: Fields, *, notes: list[str]) -> Numbers:
    """Peak memory of the whole run; unknown if an earlier version resumed it and recorded only the last process."""
    summary = record.section("summary")
    peaks = {
        "gpu_memory": summary.number("max_cuda_mem_allocated_bytes_rank0"),
        "gpu_memory_reserved": summary.number("max_cuda_mem_reserved_bytes_rank0"),
        "host_memory": summary.number("peak_rss_bytes_rank0"),
    }
    if not only_last_process_recorded(record):
        return peaks
    notes.append("peak memory was recorded of the last process alone: treated as unknown")
    return dict.fromkeys(peaks)
