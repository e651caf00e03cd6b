"""The turns of a sweep: their order, one training each, and the figures of it."""

import contextlib
import random
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from dsgpt.benchmarks.launch import environment_for
from dsgpt.benchmarks.sweep_cells import Cell, ComparisonPlan, comparable, judge_turns
from dsgpt.common.errors import EXIT_USER_ERROR, UserError, is_number
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import JsonError, clipped_text, read_as, read_object
from dsgpt.record.runs import read_run, read_step_curves
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE
from dsgpt.record.suites import Compared, Comparison, Spread, State, SweepCell, Turn

# Runs one training with the launcher that users use, ends it after a limit, and says how it ended.

LEAVE_SEC = 5.0
"""Seconds between SIGTERM and SIGKILL."""
LONGEST_LINE = 300
_TAIL_BYTES = 1 << 20
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|\bMemoryError\b|can't allocate memory|annot allocate memory"
)
_EXIT_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)", flags=re.MULTILINE)
"""In the report of ``torchrun``, which itself ends with 1 after every failure."""
_ERROR = re.compile(r"^(?:\[\w+\]:)?error: (.*)$")
_EXCEPTION = re.compile(r"^(?:\[\w+\]:)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a training ended."""

    state: State
    message: str | None
    """The last line of its log that names an error; None if it is done."""
    seconds: float


def train(command: Sequence[str], *, log: Path, limit_sec: float, cwd: Path, device: str) -> Ending:
    """Run ``command`` in a process group of its own, with its output in ``log``.

    Args:
        command: launcher, script and flags.
        log: the file to write.
        limit_sec: seconds after which all its processes are ended.
        cwd: where it runs.
        device: ``cpu`` or ``cuda``; on a CPU, DeepSpeed's launcher is told not to look for GPUs.
    """
    started = time.perf_counter()
    with log.open("wb") as output, _own_group(command, output.fileno(), cwd=cwd, device=device) as process:
        try:
            code: int | None = process.wait(timeout=limit_sec)
        except subprocess.TimeoutExpired:
            code = None
    seconds = time.perf_counter() - started
    text = _tail(log)
    if code is None:
        message = f"did not end within {limit_sec:g} s; its last line: {_last_line(text)}"
        return Ending(state=State.TIMED_OUT, message=message, seconds=seconds)
    state = state_of(code, text)
    return Ending(state=state, message=None if state == State.DONE else error_line(code, text), seconds=seconds)


def state_of(code: int, text: str) -> State:
    """What the exit code of the command and the end of its output say."""
    if code == 0:
        return State.DONE
    if _OUT_OF_MEMORY.search(text):
        return State.OUT_OF_MEMORY
    reported = _EXIT_CODE.findall(text)
    return State.REFUSED if (int(reported[-1]) if reported else code) == EXIT_USER_ERROR else State.FAILED


def error_line(code: int, text: str) -> str:
    """The line of an output that says best why it ended: memory, this program's error, an exception, or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    memory = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    own = [found[1] for line in lines if (found := _ERROR.match(line))]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    if code == -signal.SIGKILL and not (memory or own):
        return "was killed with SIGKILL, as the system does when memory runs out"
    if own and not memory:
        return clipped_text(own[-1], width=LONGEST_LINE)
    best = next((found[-1] for found in (memory, exceptions, lines) if found), "it printed nothing")
    return clipped_text(f"exit code {code}: {best}", width=LONGEST_LINE)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return clipped_text(lines[-1], width=LONGEST_LINE) if lines else "it printed nothing"


def _tail(log: Path) -> str:
    """The end of the log."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace")


@contextlib.contextmanager
def _own_group(command: Sequence[str], output: int, *, cwd: Path, device: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The running command; at the end of the context none of its processes is left."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment_for(device),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the launcher and all that it started: ``torchrun`` gives each worker a session of its own."""
    family = [psutil.Process(process.pid)]
    with contextlib.suppress(psutil.NoSuchProcess):
        family += family[0].children(recursive=True)
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.terminate()
    _, alive = psutil.wait_procs(family, timeout=LEAVE_SEC)
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


PLAN_FILE, RESULT_FILE = "plan.json", "result.json"


# The order of the turns, and the folder in which a sweep keeps them, so that an interrupted one goes on.


@dataclass(frozen=True, kw_only=True)
class PlannedTurn:
    """A cell's training in one repeat."""

    cell: Cell
    repeat: int
    """From 1."""
    place: int
    """In the order of all turns, from 1."""

    @property
    def folder(self) -> str:
        """Its path below the sweep's folder."""
        return f"turns/{self.repeat}/{self.cell.folder}"


def ordered_turns(cells: Sequence[Cell], *, repeats: int, seed: int) -> list[PlannedTurn]:
    """Every cell once in each repeat, each repeat in an order of its own that ``seed`` draws.

    Load that comes and goes then meets all cells, and more repeats continue the same order.
    """
    turns: list[PlannedTurn] = []
    for repeat in range(1, repeats + 1):
        shuffled = list(cells)
        random.Random(f"{seed}, repeat {repeat}").shuffle(shuffled)
        first = len(turns) + 1
        turns += [
            PlannedTurn(cell=cell, repeat=repeat, place=place) for place, cell in enumerate(shuffled, start=first)
        ]
    return turns


class TurnStore:
    """The folder of a sweep's turns.

    Args:
        folder: made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def require(self, plan: Mapping[str, Any]) -> None:
        """Refuse a folder with turns of another sweep; it need not exist.

        Args:
            plan: everything that must be equal for turns of two commands to be compared, as JSON can hold it.

        Raises:
            UserError: the folder holds the turns of another sweep.
        """
        file = self.folder / PLAN_FILE
        if not file.exists():
            return
        try:
            earlier = read_object(file)
        except JsonError as error:
            raise UserError(f"{file}: cannot be read: {error}; remove {self.folder} to start anew") from error
        changed = [key for key in plan if plan[key] != earlier.get(key)]
        if changed:
            raise UserError(
                f"{self.folder}: holds turns of a sweep with other {', '.join(changed)}, which cannot be compared with "
                "new ones: give another --output, or remove the folder to start anew"
            )

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Make the folder, and note what its turns are of."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.folder / PLAN_FILE, dict(plan))

    def result(self, turn: PlannedTurn) -> Turn | None:
        """The result of a turn that has ended; None if it has not.

        Raises:
            UserError: its file cannot be read.
        """
        file = self.folder / turn.folder / RESULT_FILE
        if not file.exists():
            return None
        try:
            return read_as(file, Turn)
        except JsonError as error:
            raise UserError(f"{file}: cannot be read as a turn: {error}; remove it to repeat the turn") from error

    def keep(self, turn: PlannedTurn, result: Turn) -> None:
        """Write the result of a turn that has ended."""
        write_json_atomic(self.folder / turn.folder / RESULT_FILE, asdict(result))

    def left(self, turns: Sequence[PlannedTurn]) -> Iterator[PlannedTurn]:
        """Those without a result."""
        return (turn for turn in turns if self.result(turn) is None)


# Figures of a turn, read from what its training wrote; of a cell, over its turns; and of a comparison.

SEC_PER_HOUR = 3600

Losses = Mapping[float, float]
"""Training loss by step, nats per token."""


def turn_of(planned: PlannedTurn, ending: Ending, folder: Path) -> Turn:
    """The result of a turn.

    Args:
        planned: what ran.
        ending: how it ended.
        folder: of the run.
    """
    known: dict[str, Any] = {"cell": planned.cell.name, "repeat": planned.repeat, "place": planned.place}
    known |= {"seconds": round(ending.seconds, 3)}
    if ending.state != State.DONE:
        return Turn(**known, state=ending.state, message=ending.message)
    try:
        run, record = read_run(folder, name=planned.cell.name), read_object(folder / RECORD_FILE)
    except (UserError, JsonError) as error:
        return Turn(**known, state=State.FAILED, message=f"its record cannot be read: {error}")
    return Turn(
        **known,
        state=State.DONE,
        message=None,
        train_time_sec=run.train_time,
        tokens_per_sec=run.tokens_per_sec,
        peak_memory_bytes_rank0=run.host_memory if run.gpu_memory is None else run.gpu_memory,
        model_state_bytes_by_rank=_numbers(_at(record, "cost", "model_state_bytes_per_rank", "total_by_rank")),
        sent_bytes_per_step=_number(_at(record, "cost", "communication_per_step", "ring_bytes_per_rank")),
        communication_share=_number(_at(record, "summary", "communication_share")),
        joules=_number(_at(record, "summary", "gpu_use", "energy_joules")),
        final_loss=run.final_train_loss,
        final_val_loss=run.final_val_loss,
        footprint=run.footprint,
        work=dict(run.work),
    )


def time_to_loss(folder: Path, target: float) -> float | None:
    """Seconds of training steps until a step of the run in ``folder`` had this loss or less; None if none had."""
    train, *_ = read_step_curves(folder / STEPS_FILE, [])
    return next((point.time for point in train.points if point.loss <= target), None)


def losses_of(folder: Path) -> Losses:
    """The losses of the run in ``folder``, from its lines of steps; empty without them."""
    train, *_ = read_step_curves(folder / STEPS_FILE, [])
    return train.at_steps()


def cell_of(cell: Cell, turns: Sequence[Turn], *, price: float | None) -> SweepCell:
    """A cell with its turns and figures; ``price`` is of a device hour."""
    done = [turn for turn in turns if turn.state == State.DONE]
    first = done[0] if done else None
    return SweepCell(
        name=cell.name,
        devices=cell.devices,
        launcher=cell.launcher,
        flags=list(cell.flags),
        turns=list(turns),
        tokens_per_sec=_over(done, lambda turn: turn.tokens_per_sec),
        tokens_per_sec_per_device=_over(done, lambda turn: _scaled(turn.tokens_per_sec, 1 / cell.devices)),
        peak_memory_bytes_rank0=_over(done, lambda turn: turn.peak_memory_bytes_rank0),
        model_state_bytes_by_rank=first.model_state_bytes_by_rank if first else None,
        sent_bytes_per_step=first.sent_bytes_per_step if first else None,
        communication_share=_over(done, lambda turn: turn.communication_share),
        joules=_over(done, lambda turn: turn.joules),
        final_loss=first.final_loss if first else None,
        time_to_target_sec=_over_all(done, lambda turn: turn.time_to_target_sec),
        cost=_over(done, lambda turn: cost_of(turn, devices=cell.devices, price=price)),
    )


def cost_of(turn: Turn, *, devices: int, price: float | None) -> float | None:
    """What the devices cost while training steps ran; None without a price per device hour."""
    return None if price is None else _scaled(turn.train_time_sec, devices * price / SEC_PER_HOUR)


def comparison_of(
    plan: ComparisonPlan, cells: Sequence[SweepCell], *, losses: Mapping[tuple[str, int], Losses]
) -> Comparison:
    """The cells of a comparison beside its baseline, judged by the records of their turns.

    Args:
        plan: what is compared.
        cells: all cells of the sweep.
        losses: of the turns that are done, by cell and repeat.
    """
    by_name = {cell.name: cell for cell in cells}
    base = by_name[plan.baseline]
    return Comparison(
        name=plan.name,
        kind=plan.kind,
        baseline=plan.baseline,
        cells=[_compared(plan, base, by_name[name], losses) for name in plan.cells if name in by_name],
    )


def _compared(
    plan: ComparisonPlan, base: SweepCell, cell: SweepCell, losses: Mapping[tuple[str, int], Losses]
) -> Compared:
    ours, theirs = cell.done(), base.done()
    if not ours or not theirs:
        missing = cell.name if not ours else base.name
        return Compared(cell=cell.name, same_work=f"same work: unknown ({missing} has no result)", comparable=False)
    verdict = judge_turns((turn.cell, turn) for turn in (*theirs.values(), *ours.values()))
    shared = [repeat for repeat in theirs if repeat in ours]
    if not comparable(verdict, plan.kind):
        return Compared(cell=cell.name, same_work=verdict.line(), comparable=False)
    ratios = [_ratio(ours[repeat].tokens_per_sec, theirs[repeat].tokens_per_sec) for repeat in shared]
    speed_up = spread([ratio for ratio in ratios if ratio is not None])
    pairs = [(losses.get((cell.name, repeat), {}), losses.get((base.name, repeat), {})) for repeat in shared]
    same = plan.kind == "same training"
    return Compared(
        cell=cell.name,
        same_work=verdict.line(),
        comparable=True,
        speed_up=speed_up,
        efficiency=None if speed_up is None else speed_up.median * base.devices / cell.devices,
        loss_difference=_difference(cell.final_loss, base.final_loss) if same else None,
        largest_loss_difference=_largest_difference(pairs) if same else None,
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Median, smallest and largest; None for no value."""
    if not values:
        return None
    return Spread(
        median=statistics.median(values), smallest=min(values), largest=max(values), values=[*map(float, values)]
    )


def _over(turns: Sequence[Turn], figure: Callable[[Turn], float | None]) -> Spread | None:
    return spread([value for turn in turns if (value := figure(turn)) is not None])


def _over_all(turns: Sequence[Turn], figure: Callable[[Turn], float | None]) -> Spread | None:
    """The same, but None if a turn lacks the figure: of a target, the others would be only those that were lucky."""
    return None if any(figure(turn) is None for turn in turns) else _over(turns, figure)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _difference(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _largest_difference(pairs: Iterable[tuple[Losses, Losses]]) -> float | None:
    """The largest distance of two losses of a step; None if a pair has no losses, or losses of different steps."""
    distances: list[float] = []
    for ours, theirs in pairs:
        if not ours or ours.keys() != theirs.keys():
            return None
        distances += [abs(ours[step] - theirs[step]) for step in ours]
    return max(distances, default=None)


def _at(record: dict[str, Any], *keys: str) -> Any:
    """The value at a path of keys; None where there is none."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _numbers(value: Any) -> list[float] | None:
    return [float(item) for item in value] if isinstance(value, list) and all(map(is_number, value)) else None
