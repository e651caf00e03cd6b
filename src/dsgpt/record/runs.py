"""A training run as charts and dashboard read it: its record, its curves, its memory and step times."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dsgpt.common.errors import UserError
from dsgpt.record import schema, work
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, Fields, mean

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

# Loss curves: from metrics.jsonl if there is one, otherwise one point at the end of each epoch.

SMOOTH_FROM = 200
"""Curves with more points are drawn faint, with their trailing mean on top."""


Figures = Sequence[float | None]
"""Figures of epochs; None for unknown ones."""


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
    by_step: Mapping[float, float] | None = None
    """Losses of steps without their points: those of 100,000 steps would take half a second."""

    def at_steps(self) -> Mapping[float, float]:
        """Loss by optimizer step, for the points whose step is known."""
        return self.by_step or {point.step: point.loss for point in self.points if point.step is not None}


def read_step_curves(path: Path, notes: list[str]) -> tuple[Curve, Curve, list[float]]:
    """Training curve, validation curve and step times of a ``metrics.jsonl``; all are empty if the file is missing.

    The times are seconds of each step that the file does not mark as warm-up; it has none if it marks none. An
    incomplete last line is ignored, because a run may be writing it; other broken lines are skipped and noted. If
    a step was recorded twice, the last line counts.

    Raises:
        UserError: the file cannot be read.
    """
    curves: dict[str, dict[float, Point]] = {"loss": {}, "val_loss": {}}
    tokens: dict[float, float | None] = {}
    times: dict[float, float] = {}
    doubts: list[str] = []
    for line in read_objects(path, doubts) if path.exists() else ():
        fields = Fields(line, notes=doubts)
        if (step := fields.number("step")) is None:
            continue
        tokens[step] = fields.number("tokens") if fields.has("tokens") else tokens.get(step)
        for key, curve in curves.items():
            if (loss := fields.number(key)) is not None:
                curve[step] = Point(loss, step, fields.number("train_time_sec"), None, tokens[step])
        seconds = Fields(line, notes=[]).number("step_time_sec")
        if seconds is not None and fields.raw("warm_up") is False:
            times[step] = seconds
    if doubts:
        notes.append(f"{STEPS_FILE}: {doubts[0]}" + (f" (and {len(doubts) - 1} more like it)" if doubts[1:] else ""))
    train, validation = (Curve(tuple(points[step] for step in sorted(points))) for points in curves.values())
    return train, validation, [times[step] for step in sorted(times)]


def epoch_curve(losses: Figures, *, steps: Figures, times: Figures, tokens: Figures = ()) -> Curve:
    """One point at the end of each epoch; steps, times (seconds) and tokens are per epoch and may be unknown."""

    def ends(values: Figures) -> Iterator[float | None]:
        """Cumulative sums, unknown from the first unknown value on; all unknown unless every epoch has a value."""
        leading = takewhile(lambda value: value is not None, values if len(values) == len(losses) else ())
        return chain(accumulate(leading), repeat(None))

    places = zip(losses, ends(steps), ends(times), ends(tokens), strict=False)
    points = [
        Point(loss, step, time, epoch, count)
        for epoch, (loss, step, time, count) in enumerate(places, start=1)
        if loss is not None
    ]
    return Curve(tuple(points), per_epoch=True)


def smoothed(values: "Values", *, window: int) -> "Values":
    """Mean of each value and the ``window - 1`` before it, shape (n,); NaN counts as missing."""
    if window <= 1 or len(values) == 0:
        return values
    import numpy as np  # noqa: PLC0415 - takes a sixth of the time of --help

    valid = ~np.isnan(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(valid, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(valid)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    amount = counts[ends] - counts[starts]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(amount > 0, (sums[ends] - sums[starts]) / amount, np.nan)


def window_of(points: int) -> int:
    """Number of points in the trailing mean of a curve of ``points``; 1 if the points themselves are drawn."""
    return max(1, points // 50) if points > SMOOTH_FROM else 1


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
            value = schema.parse_lenient(line, doubts)
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
_KEYS_OF_PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients", "new_gradients"),
    "optimizer": ("optimizer",),
    "master weights": ("master",),
    "activations": ("activations", "logits"),
    "buckets and gathered layers": ("buckets", "gathered"),
}
PREDICTED_PARTS = {key: part for part, keys in _KEYS_OF_PARTS.items() for key in keys}
"""Keys of the record's ``predicted_peak_memory``; all others are ``other``."""
OTHER = "other"
PARTS = (*_KEYS_OF_PARTS, OTHER)
"""The parts of memory, in the order in which they are drawn."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The figures; None for what the record does not have. Sizes are in bytes."""

    model_state: dict[str, float] | None = None
    """Bytes of model state by part of ``PARTS``, on the rank that holds most, while the optimizer steps."""
    state_rank0: float | None = None
    """Bytes of the model state of rank 0; None if some of it is not on the device."""
    predicted: dict[str, float] | None = None
    """Predicted bytes by part of ``PARTS``, at the peak of a step of rank 0."""
    peak: float | None = None
    """Measured peak of rank 0, in bytes."""
    peak_kind: Literal["allocated", "resident", "tensors"] | None = None
    """Kind of the peak: allocated by PyTorch on the GPU; the resident set of the process on a CPU, which has Python and
    all libraries, too; or all tensors, counted one by one (``benchmark.py plan``)."""
    step_times_sec: list[float] | None = None
    """Quantiles of the times of the steps after the warm-up, at equal distances from the smallest to the largest."""

    @property
    def rest(self) -> float | None:
        """Bytes that PyTorch allocated at the peak beyond rank 0's model state: activations and all else."""
        if self.peak_kind != "allocated" or self.peak is None or self.state_rank0 is None:
            return None
        return max(0.0, self.peak - self.state_rank0)


def quantiles(values: Sequence[float]) -> list[float]:
    """``QUANTILES + 1`` quantiles at equal distances, interpolated linearly; all ``values`` if they are fewer."""
    ordered = sorted(values)
    if len(ordered) <= QUANTILES + 1:
        return ordered
    return [ordered[0], *statistics.quantiles(ordered, n=QUANTILES, method="inclusive"), ordered[-1]]


def parts_of_prediction(parts: Fields) -> dict[str, float] | None:
    """The bytes of a predicted peak by part of ``PARTS``; None if there are none."""
    sizes: dict[str, float] = {}
    for key in parts.names():
        if (size := parts.number(key)) is not None:
            name = PREDICTED_PARTS.get(key, OTHER)
            sizes[name] = sizes.get(name, 0.0) + size
    return sizes or None


# A training run for the charts, read from either generation of training_metrics.json.

FLAT_SCHEMA = "flat keys"
TIMED_FROM_STEP = 4
"""Throughput starts at this step; those before are warm-up (``WARM_UP_STEPS`` in ``telemetry/meter.py``)."""
TOO_SHORT = f"fewer than {TIMED_FROM_STEP} steps"


@dataclass(frozen=True, kw_only=True)
class Run(work.Worked):
    """Facts and figures of a run that the charts use. None means unknown, never zero."""

    schema: str
    """The record's ``schema_version``; ``FLAT_SCHEMA`` for the older generation, which has none."""
    status: str | None
    date: str | None
    """Day on which its last process began, in UTC: ``2026-11-22``."""
    machine: str | None
    """The hardware; if segments used several, which steps ran on which. The same holds for the next three fields."""
    instruction_sets: str | None
    devices: str | None
    strategy: str | None
    device_count: float | None
    """Devices of all its machines; None if segments used different numbers."""
    segments: tuple[work.Segment, ...]
    """One per process of the run; at least one."""
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
    """Range of the latency over its repetitions; None if there was one, or if the record does not say."""
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
    """Bytes per step of the rank that sends most, as rings."""
    communication_share: float | None
    """Share of a step in which it waits for communication."""
    train_curve: Curve
    val_curve: Curve
    notes: tuple[str, ...]
    """Remarks on this record, for comparison.md."""

    @property
    def later_schema(self) -> str:
        """A remark on a record of a later version; empty for others."""
        return schema.later_schema(None if self.schema == FLAT_SCHEMA else self.schema)

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
        path = path / RECORD_FILE
    notes: list[str] = []
    return run_of(read_record(path, name=name, notes=notes), name=name, log=path.with_name(STEPS_FILE), notes=notes)


def read_record(path: Path, *, name: str, notes: list[str]) -> Fields:
    """Read a ``training_metrics.json`` of the run ``name``; ``notes`` receives remarks on its values.

    Raises:
        UserError: as ``read_run``.
    """
    try:
        record = schema.read_fields(path, wanted=f"a {RECORD_FILE}", notes=notes)
    except UserError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        why = f"has the run {name!r} started?"
        if path.with_name(STEPS_FILE).exists():
            why = f"the run {name!r} was cut off before its first record: continue it with --resume"
        raise UserError(f"{path}: no such file; {why}") from error
    if not {"schema_version", "training_config", "summary", "epochs", *schema.FLAT_KEYS} & {*record.names()}:
        raise UserError(f"{path}: holds none of a training record's keys; give a {RECORD_FILE}")
    return record


def run_of(record: Fields, *, name: str, log: Path | None, notes: list[str]) -> Run:
    """The run of a record.

    Args:
        record: as ``read_record`` returns it.
        name: of the run.
        log: its ``metrics.jsonl``. Without it the losses are those of epochs, and there are no times of steps.
        notes: with the remarks so far.
    """
    summary, epochs = record.section("summary"), record.sections("epochs")
    steps = [epoch.number("optimizer_steps") for epoch in epochs]
    tokens = [epoch.number("tokens_processed_global") for epoch in epochs]
    train_losses = [each.number("train_loss_avg_global") for each in epochs] or record.series("train_loss_per_epoch")
    val_losses = [each.number("val_loss_avg_global") for each in epochs] or record.series("val_loss_per_epoch")
    times, count = record.series("train_time_per_epoch"), max(len(train_losses), len(val_losses))
    if not isinstance(record.raw("train_time_per_epoch"), list) and times and count > 1:
        notes.append(f"train_time_per_epoch is one number for {count} epochs: the training time is unknown")
        times = []
    throughput = _mean_rate(record.series("train_throughput"), times=times)
    older = record.raw("schema_version") is None
    if throughput is not None and older:
        notes.append("train_throughput of the older generation names no unit: taken as tokens per second")

    train_curve, val_curve, step_times = (Curve(), Curve(), []) if log is None else read_step_curves(log, notes)
    if not train_curve.points:
        train_curve = epoch_curve(train_losses, steps=steps, times=times, tokens=tokens)
    if not val_curve.points:
        val_curve = epoch_curve(val_losses, steps=steps, times=times, tokens=tokens)

    gpu, host = summary.number("max_cuda_mem_allocated_bytes_rank0"), summary.number("peak_rss_bytes_rank0")
    resumed = record.raw("resumed_from") is not None
    if resumed:
        notes.append(f"resumed from {str(record.raw('resumed_from'))[:80]}")
    segments = work.read_segments(record)
    notes.extend(work.differences(segments, noted=True))
    for change in record.sections("changed_at_resume"):
        if (what := change.text("name")) in {"validation data", "validation windows"}:
            step = str(change.raw("step"))[:80]
            notes.append(f"validation losses are of two sets: the {what} changed after step {step}")
            val_losses = []  # those of earlier epochs may be of the other set
    return Run(
        name=name,
        schema=FLAT_SCHEMA if older else str(record.raw("schema_version"))[:20],
        status=record.text("status"),
        date=(record.text("timestamp_utc") or "")[:10] or None,
        machine=work.setup_over_time(segments, work.HARDWARE),
        instruction_sets=work.setup_over_time(segments, work.INSTRUCTIONS),
        devices=work.setup_over_time(segments, work.DEVICES),
        strategy=work.setup_over_time(segments, work.STRATEGY),
        device_count=record.section("hardware").number("world_size"),
        segments=segments,
        resumed=resumed,
        weights=record.text("weights_sha256"),
        work=work.read_work(
            record,
            steps=first(summary.number("optimizer_steps"), total(steps)),
            tokens=first(summary.number("tokens_processed_global"), total(tokens)),
        ),
        epochs=count,
        train_time=first(summary.number("train_time_sec"), total(times)),
        tokens_per_sec=first(summary.number("mean_tokens_per_sec_global"), throughput),
        final_train_loss=first(summary.number("final_train_loss"), *train_losses[-1:]),
        best_train_loss=_lowest(train_losses),
        final_val_loss=first(summary.number("final_val_loss"), *val_losses[-1:]),
        best_val_loss=first(summary.number("best_val_loss"), _lowest(val_losses)),
        **_inference(record, notes=notes),
        gpu_memory=gpu,
        gpu_memory_reserved=summary.number("max_cuda_mem_reserved_bytes_rank0"),
        host_memory=host,
        footprint=_footprint(record, gpu=gpu, host=host, step_times=step_times),
        sent_bytes_per_step=record.section("cost").section("communication_per_step").number("ring_bytes_per_rank"),
        communication_share=summary.number("communication_share"),
        train_curve=train_curve,
        val_curve=val_curve,
        notes=tuple(dict.fromkeys(notes)),
    )


def _inference(record: Fields, *, notes: list[str]) -> dict[str, Any]:
    """The ``inference`` section, or else the flat keys, whose latency is for 100 new tokens by definition."""
    inference = record.section("inference")
    latency, throughput = inference.number("latency_sec"), inference.number("tokens_per_sec")
    new_tokens = inference.number("new_tokens")
    if latency is None and throughput is None:
        latency, throughput = mean(record.series("inference_latency")), mean(record.series("inference_throughput"))
        new_tokens = None if latency is None else float(schema.GENERATED_TOKENS)
        if latency is not None and record.raw("schema_version") is None:
            notes.append("inference_latency of the older generation is taken as seconds for 100 new tokens")
    low, high = inference.number("latency_min_sec"), inference.number("latency_max_sec")
    several = (inference.number("repetitions") or 0) > 1
    return {
        "inference_latency": latency,
        "latency_range": (low, high) if several and low is not None and high is not None else None,
        "inference_tokens_per_sec": throughput,
        "prompt_tokens": inference.number("prompt_tokens"),
        "new_tokens": new_tokens,
    }


def _footprint(record: Fields, *, gpu: float | None, host: float | None, step_times: Sequence[float]) -> Footprint:
    """The footprint of a run, whose peaks are allocated on the GPU and resident in the process of rank 0."""
    state = record.section("cost").section("model_state_bytes_per_rank")
    predicted = record.section("summary").section("predicted_peak_memory").section("rank0").section("parts")
    parts = {name: size for key, name in STATE_PARTS.items() if (size := state.number(key)) is not None}
    by_rank = state.series("total_by_rank")
    return Footprint(
        model_state=parts or None,
        state_rank0=by_rank[0] if by_rank and len(state.section("by_device").names()) == 1 else None,
        predicted=parts_of_prediction(predicted),
        peak=first(gpu, host),
        peak_kind="allocated" if gpu is not None else "resident" if host is not None else None,
        step_times_sec=quantiles(step_times) or None,
    )


def first(*values: float | None) -> float | None:
    """The first known value."""
    return next((value for value in values if value is not None), None)


def total(values: Sequence[float | None]) -> float | None:
    """The sum; None if any value is unknown."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers and len(numbers) == len(values) else None


def _lowest(values: Sequence[float | None]) -> float | None:
    """The smallest of the known values; None if there is none."""
    return min((value for value in values if value is not None), default=None)


def _mean_rate(rates: Sequence[float | None], *, times: Sequence[float | None]) -> float | None:
    """Mean rate over the epochs, weighted by their seconds if both are known for each epoch."""
    pairs = [(rate, sec) for rate, sec in zip(rates, times, strict=False) if rate is not None and sec is not None]
    all_seconds = sum(seconds for _, seconds in pairs)
    if len(rates) == len(times) == len(pairs) and all_seconds:
        return sum(rate * seconds for rate, seconds in pairs) / all_seconds
    return mean(rates)
