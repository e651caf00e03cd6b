"""``.venv/bin/python src/benchmark.py compare A B``: is B slower than A beyond noise?

A and B are two runs, paired by step, or two sweeps or cells of sweeps, paired by repeat.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.frame import EXIT_FAILED
from dsgpt.benchmarks.sweep_cells import comparable, judge_turns
from dsgpt.benchmarks.sweep_page import CONFIDENCE, SpeedDifference, block_length, speed_difference
from dsgpt.common.errors import EXIT_DONE, Problems, UserError, did_you_mean, is_number
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import NO_DIFFERENCE, machine_words
from dsgpt.record.equal_work import Verdict, judge
from dsgpt.record.runs import Run, read_run
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, read_steps
from dsgpt.record.suites import MAX_BYTES, SWEEP_FILE, Sweep, SweepCell, read_sweep
from dsgpt.record.work import Worked

CELL_MARK = "#"
"""Between the path of a sweep and the name of a cell."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Speeds of A and B, pair by pair, and what they did."""

    label: str
    a: list[float]
    b: list[float]
    """Tokens per second."""
    of: str
    """What a pair is: ``repeats`` or ``steps``."""
    work: str
    """The verdict on the work, one line."""
    equal: bool
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
    found = list(_pairs(*_sources(one, other)))
    unequal = [pairs for pairs in found if not pairs.equal]
    if unequal and not allow_unequal:
        hint = "give --allow_unequal to compare their tokens per second nevertheless"
        raise UserError(*(f"{pairs.label}: {pairs.work}: {hint}" for pairs in unequal))
    slower = False
    for pairs in found:
        if not pairs.equal:
            print(f"{pairs.label}: NOT EQUAL WORK: {pairs.work}")
        if pairs.machines[0] != pairs.machines[1]:
            print(f"{pairs.label}: other machines: A ran on {pairs.machines[0]}, B on {pairs.machines[1]}")
        block = 1 if pairs.of == "repeats" else block_length(len(pairs.a))
        difference = speed_difference(pairs.a, pairs.b, block=block)
        print(_line(pairs, difference))
        slower |= difference.verdict == "slower"
    return EXIT_FAILED if slower else EXIT_DONE


def _line(pairs: Pairs, difference: SpeedDifference) -> str:
    """The result on one line."""
    change = f"B is {abs(difference.change):.1%} {difference.verdict} than A"
    if difference.verdict == NO_DIFFERENCE:
        change = f"A and B: {NO_DIFFERENCE}"
    interval = f"{CONFIDENCE:.0%} interval {difference.low:+.1%} to {difference.high:+.1%} of its speed"
    return f"{pairs.label}: {change}, {interval}, {difference.pairs} {pairs.of}"


class _Source:
    """A or B: a run, or a sweep and perhaps one cell of it.

    Raises:
        UserError: it is neither.
    """

    def __init__(self, word: str) -> None:
        path, mark, cell = word.partition(CELL_MARK)
        self.path, self.cell = Path(path), cell if mark else None
        self.run: Run | None = None
        self.sweep: Sweep | None = None
        if self._is_sweep():
            self.sweep = read_sweep(self.path)
        elif self.cell is not None:
            raise UserError(f"{word}: {self.path} is a run, which has no cells: leave out {CELL_MARK}{self.cell}")
        else:
            self.run = read_run(self.path, name=path)

    def _is_sweep(self) -> bool:
        if self.path.is_dir():
            return (self.path / SWEEP_FILE).exists() and not (self.path / RECORD_FILE).exists()
        try:
            return {"cells", "comparisons"} <= read_object(self.path, max_bytes=MAX_BYTES).keys()
        except JsonError:
            return False  # reading it as a run says what is wrong

    def named_cell(self) -> SweepCell:
        """The cell that the user named."""
        assert self.sweep is not None
        names = [cell.name for cell in self.sweep.cells]
        if self.cell not in names:
            hint = did_you_mean(self.cell or "", names) or f"; it has {', '.join(names)}"
            raise UserError(f"{self.path}: has no cell {self.cell!r}{hint}")
        return self.sweep.cell(self.cell or "")

    def machine(self) -> str:
        """Of a sweep."""
        assert self.sweep is not None
        return machine_words(self.sweep.hardware)


def _sources(*words: str) -> tuple[_Source, _Source]:
    """A and B.

    Raises:
        UserError: with what is wrong with either.
    """
    found, problems = [], Problems()
    for word in words:
        try:
            found.append(_Source(word))
        except UserError as error:
            problems.add(*error.problems)
    problems.raise_if_any()
    one, other = found
    return one, other


def _pairs(a: _Source, b: _Source) -> Iterator[Pairs]:
    """What is compared: two runs, two named cells, or all cells that two sweeps share."""
    if a.run and b.run:
        yield _of_runs(a, b, a.run, b.run)
        return
    if not (a.sweep and b.sweep):
        run, sweep = (a, b) if a.run else (b, a)
        raise UserError(f"{run.path} is a run and {sweep.path} a sweep: compare two of a kind")
    machines = (a.machine(), b.machine())
    if (a.cell is None) != (b.cell is None):
        without = a if a.cell is None else b
        raise UserError(f"{without.path}: name a cell of it too, as {without.path}{CELL_MARK}CELL")
    if a.cell is not None:
        yield _of_cells(a.named_cell(), b.named_cell(), machines=machines)
        return
    names = {cell.name for cell in b.sweep.cells}
    shared = [cell for cell in a.sweep.cells if cell.name in names]
    if not shared:
        raise UserError(f"{a.path} and {b.path} have no cell of the same name: name one of each with {CELL_MARK}CELL")
    for cell in shared:
        yield _of_cells(cell, b.sweep.cell(cell.name), machines=machines)


def _of_cells(a: SweepCell, b: SweepCell, *, machines: tuple[str, str]) -> Pairs:
    label = a.name if a.name == b.name else f"A = {a.name}, B = {b.name}"
    ours, theirs = a.done(), b.done()
    both = [repeat for repeat in ours if repeat in theirs]
    speeds = [(ours[repeat].tokens_per_sec, theirs[repeat].tokens_per_sec) for repeat in both]
    verdict = judge_turns((name, turns[repeat]) for name, turns in (("A", ours), ("B", theirs)) for repeat in both)
    return _judged(label, speeds, of="repeats", verdict=verdict, machines=machines)


def _of_runs(a: _Source, b: _Source, one: Run, other: Run) -> Pairs:
    ours, theirs = _step_speeds(a.path), _step_speeds(b.path)
    speeds = [(ours[step], theirs[step]) for step in sorted(ours.keys() & theirs.keys())]
    verdict = judge([Worked("A", one.work, one.resumed), Worked("B", other.work, other.resumed)])
    return _judged(
        f"A = {a.path}, B = {b.path}", speeds, of="steps", verdict=verdict, machines=(one.machine, other.machine)
    )


def _judged(
    label: str,
    speeds: Sequence[tuple[float | None, float | None]],
    *,
    of: str,
    verdict: Verdict,
    machines: tuple[str | None, str | None],
) -> Pairs:
    """The pairs whose speeds are both known.

    Raises:
        UserError: there are fewer than two.
    """
    known = [(one, other) for one, other in speeds if one and other and min(one, other) > 0]
    if len(known) < 2:
        raise UserError(
            f"{label}: {len(known)} {of} have a speed in both, and a comparison needs 2: "
            + ("run more --repeats" if of == "repeats" else "the first three steps of a process are warm-up")
        )
    return Pairs(
        label=label,
        a=[one for one, _ in known],
        b=[other for _, other in known],
        of=of,
        work=verdict.line(),
        equal=comparable(verdict, "same training"),
        machines=machines,
    )


def _step_speeds(path: Path) -> Mapping[int, float]:
    """Tokens per second of every step after the warm-up.

    Raises:
        UserError: the lines of the run cannot be read.
    """
    file = (path if path.is_dir() else path.parent) / STEPS_FILE
    try:
        lines = [line for line in read_steps(file) if _counts(line)]
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}): runs are compared step by step") from error
    return {line["step"]: float(line["tokens_per_sec"]) for line in lines}


def _counts(line: Mapping[str, Any]) -> bool:
    return is_number(line.get("step")) and is_number(line.get("tokens_per_sec")) and not line.get("warm_up")
