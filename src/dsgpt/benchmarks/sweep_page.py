"""The page of a sweep, and whether a difference is beyond noise."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsgpt.benchmarks.frame import Record, judged
from dsgpt.benchmarks.sweep_cells import EQUAL, LABELS
from dsgpt.common.errors import is_number
from dsgpt.common.text import NO_DIFFERENCE, machine_words, megabytes, no_difference, table
from dsgpt.machine.console import duration
from dsgpt.record.suites import Compared, Comparison, Spread, Sweep, SweepCell, parse_sweep

CONFIDENCE, RESAMPLES, SEED = 0.95, 10_000, 1337
# Whether one of two programs is faster beyond noise: paired differences, and an interval by the bootstrap.

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""Quantiles of Student's t distribution for ``CONFIDENCE``, two-sided, with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class SpeedDifference:
    """How much faster B is than A, as a share of A's speed; negative if it is slower."""

    change: float
    low: float
    high: float
    """The ends of the interval with ``CONFIDENCE``."""
    pairs: int

    @property
    def verdict(self) -> str:
        """``faster`` or ``slower`` if the whole interval is on that side of 0, otherwise ``NO_DIFFERENCE``."""
        if no_difference(self.low, self.high, than=(0.0, 0.0)):
            return NO_DIFFERENCE
        return "faster" if self.low > 0 else "slower"


def speed_difference(a: Sequence[float], b: Sequence[float], *, block: int = 1, seed: int = SEED) -> SpeedDifference:
    """Compare the speeds of pairs by the geometric mean of their ratios.

    The interval is the percentile interval of a circular block bootstrap (Politis and Romano, 1992). Resamples of a few
    pairs vary too little: of two equal programs, the interval of three pairs calls every fourth different. So with
    fewer than ten pairs it is that of Student's t test of the logarithms, if that is wider.

    Args:
        a: speeds of A, above 0.
        b: those of B, pair by pair.
        block: pairs that are drawn together, because what slows one may slow its neighbours; 1 for independent pairs.
        seed: of the resamples.

    Raises:
        ValueError: fewer than two pairs, or unequal numbers of speeds.
    """
    import numpy as np  # noqa: PLC0415 - takes its time

    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"{len(a)} and {len(b)} speeds are not two pairs or more")
    logs = np.log(np.asarray(b, dtype=np.float64)) - np.log(np.asarray(a, dtype=np.float64))
    pairs, draws = len(logs), math.ceil(len(logs) / block)
    random = np.random.default_rng(seed)
    starts = random.integers(0, pairs, size=(RESAMPLES, draws))  # (R, D)
    places = (starts[:, :, None] + np.arange(block)) % pairs  # (R, D, block)
    means = logs[places.reshape(RESAMPLES, -1)[:, :pairs]].mean(axis=1)  # (R,)
    tail = (1 - CONFIDENCE) / 2
    mean, (low, high) = float(logs.mean()), np.quantile(means, [tail, 1 - tail]).tolist()
    if pairs - 1 <= len(STUDENT_T):
        half = STUDENT_T[pairs - 2] * float(logs.std(ddof=1)) / math.sqrt(pairs)
        low, high = min(low, mean - half), max(high, mean + half)
    return SpeedDifference(change=math.expm1(mean), low=math.expm1(low), high=math.expm1(high), pairs=pairs)


def block_length(steps: int) -> int:
    """The usual length of a block for that many neighbouring steps: their cube root."""
    return max(1, round(math.cbrt(steps)))


UNKNOWN = "unknown"
_EMPTY = ""
_COUNTS = ("model n_layer", "model n_embd", "optimizer steps", "global batch", "sequence length")


def sweep_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.sweep`` makes it.
        source: the record's path, for the reader.
    """
    sweep = _read(record)
    parts = [_head(sweep, source), "## Cells", _cells(sweep), _legend(sweep)]
    for comparison in sweep.comparisons:
        parts += [f"## {_text(comparison.name)}", _comparison(sweep, comparison)]
    parts += ["## Turns that are not done", _failures(sweep)]
    return "\n\n".join(parts) + "\n"


def summary_lines(record: Record) -> list[str]:
    """A line for each cell, for a console."""
    lines = []
    for cell in _read(record).cells:
        speed = f"{_spread(cell.tokens_per_sec, _whole)} tokens per second"
        lines.append(f"{cell.name}: {speed if cell.tokens_per_sec else _states(cell)}")
    return lines


def _read(record: Record) -> Sweep:
    """The record with its types checked; raises ``JsonError``, a ``ValueError``."""
    return parse_sweep(json.dumps(record).encode())


def _head(sweep: Sweep, source: str) -> str:
    hardware = sweep.hardware
    return f"""# Sweep: {_text(sweep.suite)}

Generated from `{source}` by `.venv/bin/python src/benchmark.py run --table-from {source}`.

Every cell was trained {sweep.repeats} times. The turns of a repeat ran one after another in an order drawn with seed
{sweep.seed}, then came the next repeat. A figure is the median over the repeats, with the smallest and largest value
behind it. A speed-up whose range holds 1 reads "no difference". All turns together took {duration(sweep.seconds)}.
Unknown is what was not recorded; it is never 0.
{_training(sweep)}
Machine: {_text(machine_words(hardware))}; {_text(str(hardware.get("device")))}.
Commit `{sweep.git_commit}`, {sweep.timestamp_utc}."""


def _training(sweep: Sweep) -> str:
    """A line about what the first cell trained; empty without the facts of one of its turns."""
    work = next((turn.work for cell in sweep.cells[:1] for turn in cell.done().values() if turn.work), {})
    if not all(is_number(work.get(name)) for name in _COUNTS):
        return _EMPTY
    blocks, width, steps, batch, tokens = (f"{work[name]:,.0f}" for name in _COUNTS)
    return (
        f"The cell {_text(sweep.cells[0].name)} trains a GPT-2 with {blocks} blocks of width {width}\n"
        f"for {steps} steps of {batch} sequences of {tokens} tokens.\n"
    )


def _cells(sweep: Sweep) -> str:
    header = ["cell", "done", "tokens/s", "per device", "peak memory, rank 0 (MB)", "model state per rank (MB)"]
    header += ["sent per step (MB)", "final loss"]
    columns: list[tuple[str, Callable[[SweepCell], str]]] = [
        ("communication share", lambda cell: _spread(cell.communication_share, _percent)),
        ("joules", lambda cell: _spread(cell.joules, _whole)),
        ("time to target (s)", lambda cell: _spread(cell.time_to_target_sec, _two)),
        ("cost", lambda cell: _spread(cell.cost, _six)),
    ]
    optional = [(name, form) for name, form in columns if any(form(cell) != UNKNOWN for cell in sweep.cells)]
    rows = []
    for cell in sweep.cells:
        row = [_text(cell.name), f"{len(cell.done())} of {len(cell.turns)}", _spread(cell.tokens_per_sec, _whole)]
        row += [
            _spread(cell.tokens_per_sec_per_device, _whole),
            _spread(cell.peak_memory_bytes_rank0, megabytes),
        ]
        row += [_state(cell), _value(cell.sent_bytes_per_step, megabytes), _value(cell.final_loss, _four)]
        rows.append([*row, *(form(cell) for _, form in optional)])
    return table([*header, *(name for name, _ in optional)], rows)


def _legend(sweep: Sweep) -> str:
    lines = [
        "Tokens per second count training steps after the warm-up. Peak memory is what PyTorch allocated on a GPU, and "
        "the resident set of the process on a CPU. Model state is weights, gradients and optimizer, measured in a step."
    ]
    if any(cell.communication_share for cell in sweep.cells):
        lines.append(
            "The communication share is the part of a step in which it waits for communication, the mean over the "
            "ranks, measured in steps that no other figure counts."
        )
    if sweep.target_loss is not None:
        lines.append(f"Time to target is the seconds of training until a step had a loss of {sweep.target_loss:g}.")
    totals = any(cell.joules or cell.time_to_target_sec or cell.cost for cell in sweep.cells)
    if totals and (unequal := sweep.unequal_tokens()):
        lines.append(f"Time to target, joules and cost cannot be compared between all cells: {unequal}.")
    if sweep.price_per_device_hour is not None:
        price = f"{sweep.price_per_device_hour:g}"
        lines.append(f"Cost is of the training time of all devices, at {price} for a device hour.")
    return " ".join(lines)


def _comparison(sweep: Sweep, comparison: Comparison) -> str:
    """The table of a comparison; losses are only compared between equal trainings."""
    base, with_loss = sweep.cell(comparison.baseline), comparison.kind == "same training"
    first = [_text(base.name), str(base.devices), "1.00x" if base.done() else UNKNOWN]
    header = ["cell", "devices", "speed-up", "efficiency", "work"]
    if with_loss:
        header.append("loss minus baseline")
        if any(one.largest_loss_difference is not None for one in comparison.cells):  # older records lack it
            header.append("largest difference, all steps")
    columns = len(header)
    rows = [first + [_EMPTY] * (columns - len(first))]
    rows += [_compared(sweep, comparison, one) for one in comparison.cells]
    return "\n\n".join([LABELS[comparison.kind], table(header, [row[:columns] for row in rows])])


def _compared(sweep: Sweep, comparison: Comparison, one: Compared) -> list[str]:
    return [
        _text(one.cell),
        str(sweep.cell(one.cell).devices),
        _spread(one.speed_up, lambda value: f"{value:.2f}x") + judged(vars(one.speed_up) if one.speed_up else None),
        _value(one.efficiency, lambda value: f"{value:.0%}"),
        EQUAL[comparison.kind] if one.comparable else f"NOT COMPARED: {_text(one.same_work)}",
        _value(one.loss_difference, lambda value: f"{value:+.2g}"),
        _value(one.largest_loss_difference, lambda value: f"{value:.2g}"),
    ]


def _failures(sweep: Sweep) -> str:
    rows = [
        [_text(cell.name), str(turn.repeat), turn.state, _text(turn.message or "")]
        for cell in sweep.cells
        for turn in cell.failures
    ]
    return table(["cell", "repeat", "state", "why"], rows) if rows else "None: every turn trained to its end."


def _states(cell: SweepCell) -> str:
    return ", ".join(dict.fromkeys(turn.state for turn in cell.turns)) or "not run"


def _state(cell: SweepCell) -> str:
    state = cell.model_state_bytes_by_rank
    if not state:
        return UNKNOWN
    least, most = min(state), max(state)
    return megabytes(most) if least == most else f"{megabytes(least)} to {megabytes(most)}"


def _spread(value: Spread | None, form: Callable[[float], str]) -> str:
    if value is None:
        return UNKNOWN
    text = form(value.median)
    return text if len(value.values) < 2 else f"{text} ({form(value.smallest)} to {form(value.largest)})"


def _value(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else form(value)


def _text(text: str) -> str:
    """Text for a cell of a table."""
    for character in "\\|*_`<":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.replace("](", "]\\(").split())


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _two(value: float) -> str:
    return f"{value:,.2f}"


def _four(value: float) -> str:
    return f"{value:.4f}"


def _six(value: float) -> str:
    return f"{value:.6f}"
