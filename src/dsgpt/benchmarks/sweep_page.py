"""The page of a sweep, and ``benchmark.py compare A B``: is B slower than A beyond noise?

A and B are two runs, paired by step, or two sweeps or cells of sweeps, paired by repeat.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsgpt.benchmarks.frame import EXIT_FAILED, Record, filled, judged, page_of, spread_words
from dsgpt.benchmarks.sweep_cells import EQUAL, LABELS, comparable, judge_turns
from dsgpt.charts.comparison import escape
from dsgpt.common.errors import EXIT_DONE, Problems, UserError, did_you_mean, is_number
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import NO_DIFFERENCE, UNKNOWN, duration, machine_words, megabytes, no_difference, table
from dsgpt.record import suites
from dsgpt.record.equal_work import Verdict, judge
from dsgpt.record.runs import Run, read_run
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, read_steps
from dsgpt.record.work import Worked

CONFIDENCE, RESAMPLES, SEED = 0.95, 10_000, 1337
# Whether one of two programs is faster beyond noise: paired differences, and an interval by the bootstrap.

STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)
"""Quantiles of Student's t distribution for ``CONFIDENCE``, two-sided, with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class SpeedDifference:
    """Speed of B minus that of A, as a share of A's; negative if B is slower."""

    change: float
    low: float
    high: float
    """The ends of the interval with ``CONFIDENCE``."""

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
        a: speeds of A, at least two, above 0.
        b: those of B, pair by pair.
        block: pairs that are drawn together, because what slows one may slow its neighbours; 1 for independent pairs.
        seed: of the resamples.
    """
    import numpy as np  # noqa: PLC0415 - takes its time

    logs = np.log(np.asarray(b, dtype=np.float64)) - np.log(np.asarray(a, dtype=np.float64))
    pairs, draws = len(logs), math.ceil(len(logs) / block)
    starts = np.random.default_rng(seed).integers(0, pairs, size=(RESAMPLES, draws))  # (R, D)
    places = (starts[:, :, None] + np.arange(block)) % pairs  # (R, D, block)
    means = logs[places.reshape(RESAMPLES, -1)[:, :pairs]].mean(axis=1)  # (R,)
    tail = (1 - CONFIDENCE) / 2
    mean, (low, high) = float(logs.mean()), np.quantile(means, [tail, 1 - tail]).tolist()
    if pairs - 1 <= len(STUDENT_T):
        half = STUDENT_T[pairs - 2] * float(logs.std(ddof=1)) / math.sqrt(pairs)
        low, high = min(low, mean - half), max(high, mean + half)
    return SpeedDifference(change=math.expm1(mean), low=math.expm1(low), high=math.expm1(high))


def block_length(steps: int) -> int:
    """The usual length of a block for that many neighbouring steps: their cube root."""
    return max(1, round(math.cbrt(steps)))


# The page.

WHOLE = "{:,.0f}".format
_COUNTS = ("model n_layer", "model n_embd", "optimizer steps", "global batch", "sequence length")


def sweep_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.sweep`` makes it.
        source: the record's path, for the reader.
    """
    sweep = _read(record)
    work = next((turn.work for cell in sweep.cells[:1] for turn in cell.done().values() if turn.work), {})
    training = ""  # without the facts of a turn of the first cell
    if all(is_number(work.get(name)) for name in _COUNTS):
        blocks, width, steps, batch, tokens = (f"{work[name]:,.0f}" for name in _COUNTS)
        training = (
            f"The cell {_text(sweep.cells[0].name)} trains a GPT-2 with {blocks} blocks of width {width}\n"
            f"for {steps} steps of {batch} sequences of {tokens} tokens.\n"
        )
    hardware = {"shown": machine_words(sweep.hardware), "device": str(sweep.hardware.get("device"))}
    words = {name: _text(text) for name, text in ({"title": sweep.suite} | hardware).items()}
    head = filled("sweep", vars(sweep), source=source, took=duration(sweep.seconds), training=training, **words)
    parts = [head, "## Cells", _cells(sweep), _legend(sweep)]
    for comparison in sweep.comparisons:
        parts += [f"## {_text(comparison.name)}", LABELS[comparison.kind], _comparison(sweep, comparison)]
    failed = [
        [_text(cell.name), str(turn.repeat), turn.state, _text(turn.message or "")]
        for cell in sweep.cells
        for turn in cell.failures
    ]
    why = table(["cell", "repeat", "state", "why"], failed) if failed else "None: every turn trained to its end."
    return page_of(*parts, "## Turns that are not done", why)


def summary_lines(record: Record) -> list[str]:
    """A line for each cell, for a console."""
    lines = []
    for cell in _read(record).cells:
        states = ", ".join(dict.fromkeys(turn.state for turn in cell.turns)) or "not run"
        speed = f"{_spread(cell.tokens_per_sec, WHOLE)} tokens per second"
        lines.append(f"{cell.name}: {speed if cell.tokens_per_sec else states}")
    return lines


def _read(record: Record) -> suites.Sweep:
    """The record with its types checked; raises ``JsonError``, a ``ValueError``."""
    return suites.parse_sweep(json.dumps(record).encode())


def _cells(sweep: suites.Sweep) -> str:
    header = ["cell", "done", "tokens/s", "per device", "peak memory, rank 0 (MB)", "model state per rank (MB)"]
    header += ["sent per step (MB)", "final loss"]
    columns: list[tuple[str, Callable[[suites.SweepCell], str]]] = [
        ("communication share", lambda cell: _spread(cell.communication_share, "{:.1%}".format)),
        ("joules", lambda cell: _spread(cell.joules, WHOLE)),
        ("time to target (s)", lambda cell: _spread(cell.time_to_target_sec, "{:,.2f}".format)),
        ("cost", lambda cell: _spread(cell.cost, "{:.6f}".format)),
    ]
    optional = [(name, form) for name, form in columns if any(form(cell) != UNKNOWN for cell in sweep.cells)]
    rows = []
    for cell in sweep.cells:
        row = [_text(cell.name), f"{len(cell.done())} of {len(cell.turns)}", _spread(cell.tokens_per_sec, WHOLE)]
        row += [_spread(cell.tokens_per_sec_per_device, WHOLE), _spread(cell.peak_memory_bytes_rank0, megabytes)]
        state = sorted({*(cell.model_state_bytes_by_rank or ())})  # every rank's
        ends = " to ".join(map(megabytes, dict.fromkeys((state[0], state[-1])))) if state else UNKNOWN
        row += [ends, _value(cell.sent_bytes_per_step, megabytes), _value(cell.final_loss, "{:.4f}".format)]
        rows.append([*row, *(form(cell) for _, form in optional)])
    return table([*header, *(name for name, _ in optional)], rows)


def _legend(sweep: suites.Sweep) -> str:
    lines = [
        "Tokens per second count training steps after the warm-up. Peak memory is what PyTorch allocated on a GPU, and "
        "the resident set of the process on a CPU. Model state is weights, gradients and optimizer, measured in a step."
    ]
    if any(cell.communication_share for cell in sweep.cells):
        lines.append(
            "The communication share is the part of a step in which it waits for communication, the mean over the "
            "ranks. It is measured in steps that no other figure counts."
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


def _comparison(sweep: suites.Sweep, comparison: suites.Comparison) -> str:
    """The table of a comparison; losses are only compared between equal trainings."""
    base, with_loss = sweep.cell(comparison.baseline), comparison.kind == "same training"
    first = [_text(base.name), str(base.devices), "1.00x" if base.done() else UNKNOWN]
    header = ["cell", "devices", "speed-up", "efficiency", "work"]
    if with_loss:
        header.append("loss minus baseline")
        if any(one.largest_loss_difference is not None for one in comparison.cells):  # older records lack it
            header.append("largest difference, all steps")
    columns = len(header)
    rows = [first + [""] * (columns - len(first))]
    for one in comparison.cells:
        speed_up = _spread(one.speed_up, "{:.2f}x".format) + judged(vars(one.speed_up) if one.speed_up else None)
        efficiency = _value(one.efficiency, "{:.0%}".format)
        work = EQUAL[comparison.kind] if one.comparable else f"NOT COMPARED: {_text(one.same_work)}"
        row = [_text(one.cell), str(sweep.cell(one.cell).devices), speed_up, efficiency, work]
        losses = (_value(one.loss_difference, "{:+.2g}".format), _value(one.largest_loss_difference, "{:.2g}".format))
        rows.append([*row, *losses])
    return table(header, [row[:columns] for row in rows])


def _spread(value: suites.Spread | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else spread_words(value, form)


def _value(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else form(value)


def _text(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(escape(text).split())


# ``compare``: whether one of two runs, or of two sweeps, is slower.

CELL_MARK = "#"
"""Between the path of a sweep and the name of a cell."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Speeds of A and B, pair by pair, and what they did."""

    label: str
    speeds: list[tuple[float, float]]
    """Tokens per second, of the pairs in which both are known."""
    of: str
    """Kind of the pairs: ``repeats`` or ``steps``."""
    verdict: Verdict
    """Verdict on the work."""
    machines: tuple[str | None, str | None]


def compare(one: str, other: str, *, allow_unequal: bool) -> int:
    """Print for every pair of runs or cells whether B is slower; return 0 if none is beyond noise, otherwise 1.

    Args:
        one: A, the path of a run or a sweep, with ``#CELL`` for one cell of it.
        other: B, likewise.
        allow_unequal: whether to compare runs that did other work.

    Raises:
        UserError: a path cannot be read, the two cannot be paired, or their work is not the same.
    """
    sources, problems = [], Problems()
    for word in (one, other):
        with problems.collect():
            sources.append(_source(word))
    problems.raise_if_any()
    every = list(_pairs(*sources))
    for pairs in every:
        if (count := len(pairs.speeds)) < 2:
            hint = "the first three steps of a process are warm-up" if pairs.of == "steps" else "run more --repeats"
            raise UserError(f"{pairs.label}: {count} {pairs.of} have a speed in both, and a comparison needs 2: {hint}")
    unequal = {pairs.label: pairs.verdict.line() for pairs in every if not comparable(pairs.verdict, "same training")}
    if unequal and not allow_unequal:
        hint = "give --allow_unequal to compare their tokens per second nevertheless"
        raise UserError(*(f"{label}: {work}: {hint}" for label, work in unequal.items()))
    slower = False
    for pairs in every:
        if pairs.label in unequal:
            print(f"{pairs.label}: NOT EQUAL WORK: {unequal[pairs.label]}")
        if pairs.machines[0] != pairs.machines[1]:
            print(f"{pairs.label}: other machines: A ran on {pairs.machines[0]}, B on {pairs.machines[1]}")
        block = 1 if pairs.of == "repeats" else block_length(len(pairs.speeds))
        difference = speed_difference(*zip(*pairs.speeds, strict=True), block=block)
        change = f"B is {abs(difference.change):.1%} {difference.verdict} than A"
        if difference.verdict == NO_DIFFERENCE:
            change = f"A and B: {NO_DIFFERENCE}"
        interval = f"{CONFIDENCE:.0%} interval {difference.low:+.1%} to {difference.high:+.1%} of its speed"
        print(f"{pairs.label}: {change}, {interval}, {len(pairs.speeds)} {pairs.of}")
        slower |= difference.verdict == "slower"
    return EXIT_FAILED if slower else EXIT_DONE


_Source = tuple[Path, Run | suites.Sweep, str | None]
"""A or B: its path, a run or a sweep, and perhaps the name of one cell of the sweep."""


def _source(word: str) -> _Source:
    """A or B, from a command line.

    Raises:
        UserError: it is neither a run nor a sweep.
    """
    name, mark, cell = word.partition(CELL_MARK)
    path = Path(name)
    is_sweep = path.is_dir() and (path / suites.SWEEP_FILE).exists() and not (path / RECORD_FILE).exists()
    if not path.is_dir():
        with contextlib.suppress(JsonError):  # reading it as a run says what is wrong
            is_sweep = {"cells", "comparisons"} <= read_object(path, max_bytes=suites.MAX_BYTES).keys()
    if is_sweep:
        return path, suites.read_sweep(path), cell if mark else None
    if mark:
        raise UserError(f"{word}: {path} is a run, which has no cells: leave out {CELL_MARK}{cell}")
    return path, read_run(path, name=name), None


def _pairs(a: _Source, b: _Source) -> Iterator[Pairs]:
    """Pairs to compare: two runs, two named cells, or all cells that two sweeps share.

    Raises:
        UserError: they cannot be paired.
    """
    (path, one, cell), (other_path, other, other_cell) = a, b
    if isinstance(one, Run) and isinstance(other, Run):
        ours, theirs = _step_speeds(path), _step_speeds(other_path)
        speeds = [(ours[step], theirs[step]) for step in sorted(ours.keys() & theirs.keys())]
        verdict = judge([Worked("A", one.work, one.resumed), Worked("B", other.work, other.resumed)])
        label, machines = f"A = {path}, B = {other_path}", (one.machine, other.machine)
        yield Pairs(label=label, speeds=_known(speeds), of="steps", verdict=verdict, machines=machines)
        return
    if isinstance(one, Run) or isinstance(other, Run):
        run, sweep = (path, other_path) if isinstance(one, Run) else (other_path, path)
        raise UserError(f"{run} is a run and {sweep} a sweep: compare two of a kind")
    if (cell is None) != (other_cell is None):
        without = path if cell is None else other_path
        raise UserError(f"{without}: name a cell of it too, as {without}{CELL_MARK}CELL")
    named = {each.name: each for each in other.cells}
    cells = [(each, named[each.name]) for each in one.cells if each.name in named]
    if cell is not None and other_cell is not None:
        cells = [(_named_cell(path, one, cell), _named_cell(other_path, other, other_cell))]
    if not cells:
        raise UserError(f"{path} and {other_path} have no cell of the same name: name one of each with {CELL_MARK}CELL")
    for mine, beside in cells:
        label = mine.name if mine.name == beside.name else f"A = {mine.name}, B = {beside.name}"
        turns = {"A": mine.done(), "B": beside.done()}
        both = [repeat for repeat in turns["A"] if repeat in turns["B"]]
        speeds = _known((turns["A"][each].tokens_per_sec, turns["B"][each].tokens_per_sec) for each in both)
        verdict = judge_turns((name, done[repeat]) for name, done in turns.items() for repeat in both)
        machines = (machine_words(one.hardware), machine_words(other.hardware))
        yield Pairs(label=label, speeds=speeds, of="repeats", verdict=verdict, machines=machines)


def _named_cell(path: Path, sweep: suites.Sweep, name: str) -> suites.SweepCell:
    """The cell that the user named.

    Raises:
        UserError: the sweep does not have it.
    """
    cells = {cell.name: cell for cell in sweep.cells}
    if name not in cells:
        hint = did_you_mean(name, cells) or f"; it has {', '.join(cells)}"
        raise UserError(f"{path}: has no cell {name!r}{hint}")
    return cells[name]


def _known(speeds: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    """The pairs whose speeds are both known."""
    return [(one, other) for one, other in speeds if one and other and min(one, other) > 0]


def _step_speeds(path: Path) -> Mapping[int, float]:
    """Tokens per second of every step after the warm-up.

    Raises:
        UserError: the lines of the run cannot be read.
    """
    file = (path if path.is_dir() else path.parent) / STEPS_FILE
    try:
        return {
            line["step"]: float(line["tokens_per_sec"])
            for line in read_steps(file)
            if is_number(line.get("step")) and is_number(line.get("tokens_per_sec")) and not line.get("warm_up")
        }
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}): runs are compared step by step") from error
