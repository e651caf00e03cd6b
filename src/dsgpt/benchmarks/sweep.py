"""``benchmark.py run``: what a setting costs, the same training under many, in turns.

Every turn is a training of its own under the launcher that users use. Its result is on disk before the next turn
starts, so the same command continues an interrupted sweep.
"""

import contextlib
import hashlib
import json
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import frame, sweep_cells
from dsgpt.benchmarks.cells import Corpus, prepare_demo
from dsgpt.benchmarks.launch import own_group, training_words
from dsgpt.benchmarks.sweep_page import summary_lines, sweep_page
from dsgpt.common.command_line import COUNT, NUMBER, POSITIVE, Unfit, choice, flag, switch, whole
from dsgpt.common.errors import EXIT_USER_ERROR, UserError, did_you_mean, is_number
from dsgpt.common.files import sha256_of, write_json_atomic
from dsgpt.common.json_files import JsonError, clipped_text, read_as, read_object
from dsgpt.machine.launcher import launcher_command
from dsgpt.model.config import PRESETS
from dsgpt.record.runs import Curve, read_run, read_step_curves
from dsgpt.record.schema import RECORD_FILE, STEPS_FILE, Fields
from dsgpt.record.suites import SCHEMA_VERSION, SWEEP_FILE, Compared, Spread, State, SweepCell, Turn

# Runs one training with the launcher that users use, ends it after a limit, and says how it ended.

LONGEST_LINE = 300
_TAIL_BYTES = 1 << 20
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|\bMemoryError\b|(?:can't|annot) allocate memory")
_EXIT_CODE = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)", flags=re.MULTILINE)
"""Matches the exit code in the report of ``torchrun``, which itself ends with 1 after every failure."""
_ERROR = re.compile(r"^(?:\[\w+\]:)?error: (.*)$")
_EXCEPTION = re.compile(r"^(?:\[\w+\]:)?(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """End of a training."""

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
    with log.open("wb") as output, own_group(command, output, cwd=cwd, device=device) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=limit_sec)
        code = process.returncode
    seconds = time.perf_counter() - started
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    if code is not None:
        state, message = ended_with(code, text)
        return Ending(state=state, message=message, seconds=seconds)
    last = clipped_text((text.strip() or "it printed nothing").splitlines()[-1], width=LONGEST_LINE)
    late = f"did not end within {limit_sec:g} s; its last line: {last}"
    return Ending(state=State.TIMED_OUT, message=late, seconds=seconds)


def ended_with(code: int, text: str) -> tuple[State, str | None]:
    """State of a training by its exit code and the end of its output, and the line of the output that explains it.

    That is a line about memory, this program's error, an exception, or the last; None if the training is done.
    """
    if code == 0:
        return State.DONE, None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    memory = [line for line in lines if _OUT_OF_MEMORY.search(line)]
    own = [error[1] for line in lines if (error := _ERROR.match(line))]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    reported = _EXIT_CODE.findall(text)
    refused = (int(reported[-1]) if reported else code) == EXIT_USER_ERROR
    state = State.OUT_OF_MEMORY if memory else State.REFUSED if refused else State.FAILED
    if own and not memory:
        return state, clipped_text(own[-1], width=LONGEST_LINE)
    if code == -signal.SIGKILL and not memory:
        return state, "was killed with SIGKILL, as the system does when memory runs out"
    best = next((some[-1] for some in (memory, exceptions, lines) if some), "it printed nothing")
    return state, clipped_text(f"exit code {code}: {best}", width=LONGEST_LINE)


# The turns, their figures, those of a cell over its turns, and those of a comparison.

SEC_PER_HOUR = 3600
OF_THE_RUN = ("tokens_per_sec", "sent_bytes_per_step", "communication_share", "final_val_loss", "footprint")
"""Figures of a turn that its run has under the same name."""
OF_ALL_TURNS = ("tokens_per_sec", "peak_memory_bytes_rank0", "communication_share", "joules")
"""Figures of a cell that are spreads of those of its turns."""
OF_FIRST_TURN = ("model_state_bytes_by_rank", "sent_bytes_per_step", "final_loss")
"""Figures of a cell that all its turns have alike."""
PLAN_FILE, RESULT_FILE = "plan.json", "result.json"
RUN = "run"
"""The run folder of a turn, below the turn's."""

Losses = Mapping[float, float]
"""Training loss by step, nats per token."""


@dataclass(frozen=True, kw_only=True)
class PlannedTurn:
    """A cell's training in one repeat."""

    cell: sweep_cells.Cell
    repeat: int
    """Number of the repeat, from 1."""
    place: int
    """Place in the order of all turns, from 1."""


def ordered_turns(cells: Sequence[sweep_cells.Cell], *, repeats: int, seed: int) -> list[PlannedTurn]:
    """Every cell once in each repeat, each repeat in an order of its own that ``seed`` draws.

    Load that comes and goes then meets all cells, and more repeats continue the same order.
    """
    drawn: list[tuple[int, sweep_cells.Cell]] = []
    for repeat in range(1, repeats + 1):
        shuffled = list(cells)
        random.Random(f"{seed}, repeat {repeat}").shuffle(shuffled)
        drawn += [(repeat, cell) for cell in shuffled]
    return [PlannedTurn(cell=cell, repeat=repeat, place=place) for place, (repeat, cell) in enumerate(drawn, start=1)]


def turn_of(planned: PlannedTurn, ending: Ending, folder: Path) -> Turn:
    """The result of a turn that ran in the run folder ``folder``."""
    facts = asdict(ending) | {"seconds": round(ending.seconds, 3)}
    turn = Turn(cell=planned.cell.name, repeat=planned.repeat, place=planned.place, **facts)
    if ending.state != State.DONE:
        return turn
    try:
        run, record = read_run(folder, name=planned.cell.name), Fields(read_object(folder / RECORD_FILE), notes=[])
    except (UserError, JsonError) as error:
        return replace(turn, state=State.FAILED, message=f"its record cannot be read: {error}")
    by_rank = record.section("cost").section("model_state_bytes_per_rank").raw("total_by_rank")
    has_sizes = isinstance(by_rank, list) and all(map(is_number, by_rank))
    return replace(
        turn,
        **{name: getattr(run, name) for name in OF_THE_RUN},
        train_time_sec=run.train_time,
        peak_memory_bytes_rank0=run.host_memory if run.gpu_memory is None else run.gpu_memory,
        model_state_bytes_by_rank=list(map(float, by_rank)) if has_sizes else None,
        joules=record.section("summary").section("gpu_use").number("energy_joules"),
        final_loss=run.final_train_loss,
        work=dict(run.work),
    )


def cell_of(cell: sweep_cells.Cell, turns: Sequence[Turn], *, price: float | None) -> SweepCell:
    """A cell with its turns and figures; ``price`` is of a device hour."""
    done = [turn for turn in turns if turn.state == State.DONE]

    def over(figure: str, *, scale: float = 1.0) -> Spread | None:
        return spread([value * scale for turn in done if (value := getattr(turn, figure)) is not None])

    figures: dict[str, Any] = {name: over(name) for name in OF_ALL_TURNS}
    figures |= {name: getattr(done[0], name) if done else None for name in OF_FIRST_TURN}
    # Of a target, the turns that reached it would be only those that were lucky.
    all_reached = all(turn.time_to_target_sec is not None for turn in done)
    return SweepCell(
        name=cell.name,
        devices=cell.devices,
        launcher=cell.launcher,
        flags=list(cell.flags),
        turns=list(turns),
        **figures,
        tokens_per_sec_per_device=over("tokens_per_sec", scale=1 / cell.devices),
        time_to_target_sec=over("time_to_target_sec") if all_reached else None,
        cost=None if price is None else over("train_time_sec", scale=cell.devices * price / SEC_PER_HOUR),
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Median, smallest and largest; None for no value."""
    return Spread(**frame.span(list(map(float, values)))) if values else None


def compared(
    plan: sweep_cells.ComparisonPlan, base: SweepCell, cell: SweepCell, *, losses: Mapping[tuple[str, int], Losses]
) -> Compared:
    """A cell of a comparison beside its baseline, judged by the records of their turns.

    Args:
        plan: what is compared.
        base: the baseline.
        cell: the other cell.
        losses: of the turns that are done, by cell and repeat.
    """
    ours, theirs = cell.done(), base.done()
    if not ours or not theirs:
        missing = cell.name if not ours else base.name
        return Compared(cell=cell.name, same_work=f"same work: unknown ({missing} has no result)", comparable=False)
    verdict = sweep_cells.judge_turns((turn.cell, turn) for turn in (*theirs.values(), *ours.values()))
    if not sweep_cells.comparable(verdict, plan.kind):
        return Compared(cell=cell.name, same_work=verdict.line(), comparable=False)
    shared = [repeat for repeat in theirs if repeat in ours]
    speeds = [(ours[repeat].tokens_per_sec, theirs[repeat].tokens_per_sec) for repeat in shared]
    speed_up = spread([one / other for one, other in speeds if one is not None and other])
    efficiency = None if speed_up is None else speed_up.median * base.devices / cell.devices
    one = Compared(cell=cell.name, same_work=verdict.line(), comparable=True, speed_up=speed_up, efficiency=efficiency)
    if plan.kind != "same training":
        return one
    pairs = [(losses.get((cell.name, repeat), {}), losses.get((base.name, repeat), {})) for repeat in shared]
    same_steps = all(mine and mine.keys() == others.keys() for mine, others in pairs)
    distances = [abs(mine[step] - others[step]) for mine, others in pairs for step in mine] if same_steps else []
    final = None if cell.final_loss is None or base.final_loss is None else cell.final_loss - base.final_loss
    return replace(one, loss_difference=final, largest_loss_difference=max(distances, default=None))


# The suite.

DEVICES, REPEATS, LIMIT_SEC, SEED = (1, 2), 3, 900, 1337
MODEL_SIZE, STEPS, SEQ_LENGTH, VAL_STEPS = "demo", 30, 128, 2
TRAIN_DATA, RECIPE = "--train_data_path", "--deepspeed_config"
PARTS = ("train data", "validation data")
PACKAGE = Path(__file__).parents[2]


def default_output(suite: str) -> Path:
    """The record of a suite, if no other is named."""
    return Path("checkpoint") / "sweep" / Path(suite).stem / SWEEP_FILE


def _suite(word: str) -> str:
    """Reads the name of a suite, or the path of a description."""
    suites = sweep_cells.SUITES
    if word not in suites and not word.endswith(".json"):
        raise Unfit(f"must be one of {', '.join(suites)}, or a .json file, not {word}{did_you_mean(word, suites)}")
    return word


@dataclass(frozen=True, kw_only=True)
class SweepOptions(frame.SuiteOptions):
    """The command line of ``run``."""

    keep: None = None  # its work stands beside the record
    output: Path = flag(Path, "RECORD", f"the record to write (default: {default_output('SUITE')})")
    suite: str = flag(_suite, "SUITE", f"{', '.join(sweep_cells.SUITES)}, or a description, a .json file")
    devices: tuple[int, ...] | None = flag(
        frame.counts("whole numbers of at least 1 with commas between them"),
        "N,N",
        f"numbers of devices (default: {','.join(map(str, DEVICES))}; all of a description)",
    )
    repeats: int = flag(POSITIVE, "N", "turns of each cell (default: %(default)s)", default=REPEATS)
    seed: int = flag(COUNT, "N", "seed that draws the order of the turns (default: %(default)s)", default=SEED)
    limit: float = flag(POSITIVE, "N", "seconds of a turn (default: %(default)s)", default=LIMIT_SEC)
    model_size: str = flag(
        choice(tuple(PRESETS)), "SIZE", f"{', '.join(PRESETS)} (default: %(default)s)", default=MODEL_SIZE
    )
    steps: int = flag(whole(low=4), "N", "optimizer steps of a training (default: %(default)s)", default=STEPS)
    seq_length: int = flag(POSITIVE, "N", "tokens per sequence (default: %(default)s)", default=SEQ_LENGTH)
    profile_comm: int = flag(COUNT, "N", default=0)
    """steps of each training that measure communication (default: %(default)s)"""
    target_loss: float | None = flag(NUMBER, "X", "measure the time until a step has this training loss")
    price: float | None = flag(NUMBER, "X", "price of a device hour, for the cost of a training")
    device: str = frame.device_flag("cpu or cuda")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The command line of ``compare``.

    compare: is B slower than A? A and B are two runs, paired by step, or two sweeps, paired by repeat; SWEEP#CELL names
    one cell. It prints the difference with its interval. Exit code 0: B is as fast as A within noise, or faster; 1: it
    is slower beyond noise.

    Examples:
      .venv/bin/python src/benchmark.py compare checkpoint/before checkpoint/after
      .venv/bin/python src/benchmark.py compare before/sweep.json after/sweep.json
      .venv/bin/python src/benchmark.py compare "sweep.json#ddp on 2 devices" "sweep.json#zero1 on 2 devices"
    """

    a: str = flag(str, "A", "a run folder or its record, or a sweep's record, with #CELL or without", name="a")
    b: str = flag(str, "B", "a run folder or its record, or a sweep's record, with #CELL or without", name="b")
    allow_unequal: bool = switch("compare tokens per second although the work is not the same")


class SweepSuite(frame.Suite[SweepOptions, Turn]):
    """Trains what is left of a sweep, and compares its cells.

    run: train the cells of a suite, each in its own processes under the launcher that users use, again and again in a
    drawn order; write what each setting costs. Cells that are compared do the same work, or are refused before anything
    runs. A training that runs out of memory, is refused, fails or exceeds its limit is a result. An interrupted sweep
    is continued by the same command. Exit code 0: every turn has a result.

    Examples:
      .venv/bin/python src/benchmark.py run --suite scaling --devices 1,2 --repeats 3
      .venv/bin/python src/benchmark.py run --suite memory --devices 2 --repeats 1
      .venv/bin/python src/benchmark.py run --suite my-sweep.json --output checkpoint/sweep/mine/sweep.json
    """

    name, record_of, schema_version, unit = frame.SWEEP, "sweeps", SCHEMA_VERSION, "training"
    flags, page, summary = SweepOptions, staticmethod(sweep_page), staticmethod(summary_lines)
    names = f"suites: {', '.join(sweep_cells.SUITES)}"

    def __init__(self, options: SweepOptions, repository: Path) -> None:
        if options.suite is None:
            raise UserError(f"--suite is missing: name {', '.join(sweep_cells.SUITES)} or a .json file")
        super().__init__(replace(options, output=options.output or default_output(options.suite)), repository)
        if options.suite in sweep_cells.SUITES:
            self._plan = sweep_cells.built_in(options.suite, devices=options.devices or DEVICES)
        else:
            self._plan = sweep_cells.read_description(Path(options.suite), devices=options.devices)
        self._turns = ordered_turns(self._plan.cells, repeats=options.repeats, seed=options.seed)
        self._corpus: Corpus | None = None

    def plan(self) -> int:
        return len(self._turns)

    def work_folder(self, resources: ExitStack) -> Path:  # noqa: ARG002 - it stays
        """Folder beside the record, so that the next command finds the turns of this one."""
        return self.options.output.parent.resolve() / "work"

    def begin(self) -> None:
        """Prepare the text, and refuse a suite whose cells do not do the same work."""
        fingerprint = self._fingerprint()
        self._require(fingerprint)
        if any(sweep_cells.value_of(cell.flags, TRAIN_DATA) is None for cell in self._plan.cells):
            self._corpus = prepare_demo(self.repository, self.folder / "data")
        works = {}
        for cell in self._plan.cells:
            flags = self._flags(cell, self.folder / "planned")
            works[cell.name] = sweep_cells.planned_work(cell, flags, repository=self.repository)
        sweep_cells.require_equal_work(self._plan, works)
        fingerprint["data"] = {name: work and [work[part] for part in PARTS] for name, work in works.items()}
        self._require(fingerprint)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.folder / PLAN_FILE, fingerprint)
        if done := sum(self._result(planned) is not None for planned in self._turns):
            count = len(self._turns)
            self.console.say(f"{done} of {count} turns have results from before; {count - done} left")

    def _fingerprint(self) -> dict[str, Any]:
        """Facts that must be equal for turns of two commands to be one sweep. More repeats may be added."""
        options = self.options
        head = frame.record_head(SCHEMA_VERSION, device=options.device)
        sources = "".join(sha256_of(file) for file in sorted(PACKAGE.rglob("*.py")))
        named = {sweep_cells.value_of(cell.flags, RECIPE) or "" for cell in self._plan.cells}
        recipes = {name: self.repository / name for name in named}
        fingerprint = {
            "suite": asdict(self._plan),
            "settings": [options.model_size, options.steps, options.seq_length, options.device, options.profile_comm],
            "seed": options.seed,
            "limit": options.limit,
            "recipes": {name: sha256_of(file) if file.is_file() else "" for name, file in recipes.items()},
            "sources": hashlib.sha256(sources.encode()).hexdigest(),
            "software": head["env"],
            "machine": head["hardware"],
        }
        return dict(json.loads(json.dumps(fingerprint)))

    def _require(self, fingerprint: Mapping[str, Any]) -> None:
        """Refuse a folder with turns of another sweep; it need not exist.

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
        if changed := [key for key in fingerprint if fingerprint[key] != earlier.get(key)]:
            raise UserError(
                f"{self.folder}: holds turns of a sweep with other {', '.join(changed)}, which cannot be compared with "
                "new ones: give another --output, or remove the folder to start anew"
            )

    def _folder(self, planned: PlannedTurn) -> Path:
        return self.folder / "turns" / str(planned.repeat) / planned.cell.folder

    def _result(self, planned: PlannedTurn) -> Turn | None:
        """The result of a turn that has ended; None if it has not.

        Raises:
            UserError: its file cannot be read.
        """
        file = self._folder(planned) / RESULT_FILE
        if not file.exists():
            return None
        try:
            return read_as(file, Turn)
        except JsonError as error:
            raise UserError(f"{file}: cannot be read as a turn: {error}; remove it to repeat the turn") from error

    def _training_curve(self, planned: PlannedTurn) -> Curve:
        return read_step_curves(self._folder(planned) / RUN / STEPS_FILE, [])[0]

    def results(self) -> Iterator[Turn]:
        for planned in self._turns:
            turn, target = self._result(planned) or self._train(planned), self.options.target_loss
            if target is not None and turn.state == State.DONE:  # read again: the target is no setting of the training
                points = self._training_curve(planned).points
                reached = next((point.time for point in points if point.loss <= target), None)
                turn = replace(turn, time_to_target_sec=reached)
            yield turn

    def _train(self, planned: PlannedTurn) -> Turn:
        """Train, and keep the result."""
        folder, cell = self._folder(planned), planned.cell
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted turn left
        folder.mkdir(parents=True)
        script = str(self.repository / "src" / "gpt2.py")
        command = [*launcher_command(cell.launcher, cell.devices), script, *self._flags(cell, folder / RUN)]
        limit, device = self.options.limit, self.options.device
        ending = train(command, log=folder / "log.txt", limit_sec=limit, cwd=self.repository, device=device)
        turn = turn_of(planned, ending, folder / RUN)
        for checkpoint in folder.glob(f"{RUN}/step-*"):
            shutil.rmtree(checkpoint)  # twelve bytes per parameter, which nothing here reads
        write_json_atomic(folder / RESULT_FILE, asdict(turn))
        return turn

    def _flags(self, cell: sweep_cells.Cell, run_dir: Path) -> list[str]:
        """Every flag of a cell's training; those of the cell come last, and count."""
        options = self.options
        values = {name: getattr(options, name) for name in ("model_size", "seq_length", "device", "profile_comm")}
        values |= {"max_train_steps": options.steps, "max_val_steps": VAL_STEPS, "save_every": 0, "no_inference": True}
        if self._corpus is not None:
            values |= {"train_data_path": self._corpus.train, "val_data_path": self._corpus.val}
        return [*training_words(values), *cell.flags, "--checkpoint_path", str(run_dir)]

    def line(self, result: Turn, *, count: str, left: str) -> str:
        speed = "" if result.tokens_per_sec is None else f", {result.tokens_per_sec:,.0f} tokens per second"
        why = "" if result.message is None else f" ({result.message})"
        return f"{count} repeat {result.repeat}, {result.cell}: {result.state}{why}{speed}{left}"

    def record(self, results: Sequence[Turn]) -> frame.Record:
        """The sweep as ``record.sweeps`` reads it."""
        options = self.options
        turns = {cell: [turn for turn in results if turn.cell == cell.name] for cell in self._plan.cells}
        cells = {cell.name: cell_of(cell, own, price=options.price) for cell, own in turns.items()}
        losses = {(each.cell.name, each.repeat): self._training_curve(each).at_steps() for each in self._turns}
        comparisons = []
        for plan in self._plan.comparisons:
            beside = [compared(plan, cells[plan.baseline], cells[name], losses=losses) for name in plan.cells]
            comparisons.append(asdict(plan) | {"cells": [asdict(one) for one in beside]})
        head = {"suite": self._plan.name, "seed": options.seed, "repeats": options.repeats, "limit_sec": options.limit}
        head |= {"target_loss": options.target_loss, "price_per_device_hour": options.price}
        head["seconds"] = round(sum(turn.seconds for turn in results), 1)
        return head | {"cells": [asdict(cell) for cell in cells.values()], "comparisons": comparisons}

    def closing_lines(self, failures: Sequence[str]) -> list[str]:  # noqa: ARG002
        return [f"turns and logs: {self.folder}"]
