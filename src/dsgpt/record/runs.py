"""A training run as charts and dashboard read it: its record, its curves, its memory and step times."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dsgpt.common.errors import UserError
from dsgpt.record.fields import FLAT_KEYS, Epochs, Fields, first, last, lowest, mean, parse_json, read_object, total
from dsgpt.record.schema import later_schema
from dsgpt.record.work import (
    DEVICES,
    EXECUTED_BY,
    HARDWARE,
    INSTRUCTIONS,
    STRATEGY,
    Segment,
    differences,
    only_last_process_recorded,
    read_segments,
    read_work,
    setup_over_time,
)

# Loss curves: from metrics.jsonl if there is one, otherwise one point at the end of each epoch.

SMOOTH_FROM = 200
"""Curves with more points are drawn faint, with their trailing mean on top."""


class Point(NamedTuple):
    """A loss and where it was measured; a coordinate that was not recorded is None."""

    loss: float
    """Mean loss, nats per token."""
    step: float | None
    """Completed optimizer steps."""
    time: float | None
    """Seconds of training steps so far (no evaluation, no saving)."""
    epoch: float | None
    """Completed epochs; known only for the points of ``per_epoch`` curves."""
    tokens: float | None = None
    """Tokens trained on so far."""


@dataclass(frozen=True)
class Curve:
    """Losses, in the order of measurement."""

    points: tuple[Point, ...] = ()
    per_epoch: bool = False
    """True if each point is the mean of an epoch, because steps were not recorded."""

    def at_steps(self) -> dict[float, float]:
        """Loss by optimizer step, for the points whose step is known."""
        return {point.step: point.loss for point in self.points if point.step is not None}


def read_step_curves(path: Path, notes: list[str]) -> tuple[Curve, Curve]:
    """Training and validation curve of a ``metrics.jsonl``; both are empty if the file is missing.

    An incomplete last line is ignored, because a run may be writing it; other broken lines are skipped and noted. If
    a step was recorded twice, the last line counts.

    Raises:
        UserError: the file cannot be read.
    """
    train: dict[float, Point] = {}
    validation: dict[float, Point] = {}
    tokens: dict[float, float | None] = {}
    doubts: list[str] = []
    for line in read_objects(path, doubts) if path.exists() else ():
        fields = Fields(line, notes=doubts)
        step = fields.number("step")
        if step is None:
            continue
        tokens[step] = fields.number("tokens") if fields.has("tokens") else tokens.get(step)
        for key, curve in (("loss", train), ("val_loss", validation)):
            loss = fields.number(key)
            if loss is not None:
                curve[step] = Point(loss, step, fields.number("train_time_sec"), None, tokens[step])
    if doubts:
        notes.append(f"metrics.jsonl: {doubts[0]}" + (f" (and {len(doubts) - 1} more like it)" if doubts[1:] else ""))
    return _by_step(train), _by_step(validation)


def read_step_times(path: Path) -> list[float]:
    """Seconds of each step of a ``metrics.jsonl`` that it does not mark as warm-up; empty if it marks none.

    Raises:
        UserError: the file cannot be read.
    """
    times: dict[float, float] = {}
    for line in read_objects(path, []) if path.exists() else ():
        fields = Fields(line, notes=[])
        step, seconds = fields.number("step"), fields.number("step_time_sec")
        if step is not None and seconds is not None and fields.raw("warm_up") is False:
            times[step] = seconds
    return [times[step] for step in sorted(times)]


def epoch_curve(
    losses: Sequence[float | None],
    *,
    steps: Sequence[float | None],
    times: Sequence[float | None],
    tokens: Sequence[float | None] = (),
) -> Curve:
    """One point at the end of each epoch; steps, times (seconds) and tokens are per epoch and may be unknown."""
    ends = zip(*(_running_sums(values, len(losses)) for values in (steps, times, tokens)), strict=True)
    points = [
        Point(loss, step, time, epoch, count)
        for epoch, (loss, (step, time, count)) in enumerate(zip(losses, ends, strict=True), start=1)
        if loss is not None
    ]
    return Curve(tuple(points), per_epoch=True)


def smoothed(values: Sequence[float], *, window: int) -> list[float]:
    """Mean of each value with the ``window - 1`` before it (fewer at the start)."""
    sums = [0.0, *accumulate(values)]
    return [(sums[i + 1] - sums[max(0, i + 1 - window)]) / min(window, i + 1) for i in range(len(values))]


def window_of(points: int) -> int:
    """Number of points in the trailing mean of a curve of ``points``; 1 if the points themselves are drawn."""
    return max(1, points // 50) if points > SMOOTH_FROM else 1


def _by_step(points: dict[float, Point]) -> Curve:
    return Curve(tuple(points[step] for step in sorted(points)))


def _running_sums(values: Sequence[float | None], length: int) -> list[float | None]:
    """Cumulative sums, unknown from the first unknown value on; all unknown unless there are ``length`` values."""
    if len(values) != length:
        return [None] * length
    return list(accumulate(values, _sum_if_known))


def _sum_if_known(total: float | None, value: float | None) -> float | None:
    return None if total is None or value is None else total + value


def read_objects(path: Path, doubts: list[str]) -> Iterator[dict[str, Any]]:
    """Each line of a JSON-lines file that is an object; ``doubts`` receives the others, except an incomplete last one.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line, doubts)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield value
        elif number < len(lines):  # the last line has no newline yet
            doubts.append(f"line {number} is broken: skipped")


# Memory of a rank and what it holds, and the times of steps: of runs, and of the turns of sweeps.

QUANTILES = 20
"""Times of steps are kept as ``QUANTILES + 1`` quantiles, from the smallest to the largest."""
STATE_PARTS = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer", "master": "master weights"}
"""Keys of the record's ``model_state_bytes_per_rank``, and what they are called in pictures."""
PREDICTED_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "new_gradients": "gradients",
    "optimizer": "optimizer",
    "master": "master weights",
    "activations": "activations",
    "logits": "activations",
    "buckets": "buckets and gathered layers",
    "gathered": "buckets and gathered layers",
}
"""Keys of the record's ``predicted_peak_memory``; all others are ``other``."""
OTHER = "other"
PARTS = (*dict.fromkeys(PREDICTED_PARTS.values()), OTHER)
"""The parts of memory, in the order in which they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The figures; None for what the record does not have. Sizes are in bytes."""

    model_state: dict[str, float] | None = None
    """By part of ``PARTS``, of the rank that holds most, while the optimizer steps."""
    state_rank0: float | None = None
    """All model state of rank 0; None if some of it is not on the device."""
    predicted: dict[str, float] | None = None
    """By part of ``PARTS``, at the peak of a step of rank 0."""
    peak: float | None = None
    """Measured, of rank 0."""
    peak_kind: Literal["allocated", "resident", "tensors"] | None = None
    """By PyTorch on the GPU; the resident set of the process on a CPU, which holds Python and all libraries too; or all
    tensors, counted one by one (``benchmark.py plan``)."""
    step_times_sec: list[float] | None = None
    """Quantiles of the times of the steps after the warm-up, at equal distances from the smallest to the largest."""

    @property
    def rest(self) -> float | None:
        """Bytes that PyTorch allocated at the peak beyond rank 0's model state: activations and all else."""
        if self.peak_kind != "allocated" or self.peak is None or self.state_rank0 is None:
            return None
        return max(0.0, self.peak - self.state_rank0)


def read_footprint(
    record: Fields, *, gpu_memory: float | None, host_memory: float | None, step_times: Sequence[float]
) -> Footprint:
    """The footprint of a run.

    Args:
        record: of the run.
        gpu_memory: peak bytes allocated on rank 0's GPU.
        host_memory: peak resident set of rank 0's process.
        step_times: seconds of each step after the warm-up.
    """
    state = record.section("cost").section("model_state_bytes_per_rank")
    predicted = record.section("summary").section("predicted_peak_memory").section("rank0").section("parts")
    parts = {name: size for key, name in STATE_PARTS.items() if (size := state.number(key)) is not None}
    gpu = gpu_memory is not None
    return Footprint(
        model_state=parts or None,
        state_rank0=_state_of_rank_0(state),
        predicted=parts_of_prediction(predicted),
        peak=gpu_memory if gpu else host_memory,
        peak_kind=("allocated" if gpu else "resident") if gpu or host_memory is not None else None,
        step_times_sec=quantiles(step_times) or None,
    )


def quantiles(values: Sequence[float], *, count: int = QUANTILES) -> list[float]:
    """``count + 1`` quantiles of ``values`` at equal distances, interpolated linearly; all values if they are fewer."""
    ordered = sorted(values)
    if len(ordered) <= count + 1:
        return ordered
    return [quantile(ordered, index / count) for index in range(count + 1)]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of the sorted values are, interpolated linearly (NumPy's default)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def pooled(times: Sequence[Sequence[float]]) -> list[float]:
    """The quantiles of all turns of a cell together; each turn counts as much as any other."""
    return sorted(value for turn in times for value in turn)


def _state_of_rank_0(state: Fields) -> float | None:
    by_rank = state.series("total_by_rank")
    return by_rank[0] if by_rank and len(state.section("by_device").names()) == 1 else None


def parts_of_prediction(parts: Fields) -> dict[str, float] | None:
    """The bytes of a predicted peak by part of ``PARTS``; None if there are none."""
    found: dict[str, float] = {}
    for key in parts.names():
        size = parts.number(key)
        if size is not None:
            name = PREDICTED_PARTS.get(key, OTHER)
            found[name] = found.get(name, 0.0) + size
    return found or None


RECORD_NAME, LOG_NAME = "training_metrics.json", "metrics.jsonl"
# A training run for the charts, read from either generation of training_metrics.json.

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
