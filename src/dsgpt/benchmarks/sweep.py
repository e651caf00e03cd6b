"""``benchmark.py run`` and ``compare``: what a setting costs, the same training under many, in turns.

Every turn is a training of its own under the launcher that users use. Its result is on disk before the next turn
starts, so the same command continues an interrupted sweep.
"""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.sweep_cells import (
    SUITES,
    Cell,
    Suite,
    built_in,
    planned_work,
    read_description,
    require_equal_work,
    value_of,
)
from dsgpt.benchmarks.sweep_page import summary_lines, sweep_page
from dsgpt.benchmarks.sweep_turns import PlannedTurn, TurnStore, ordered_turns
from dsgpt.common.command_line import COUNT, NUMBER, POSITIVE, Unfit, choice, flag, switch, value, whole
from dsgpt.common.errors import UserError, did_you_mean
from dsgpt.common.files import sha256_of
from dsgpt.machine.launcher import launcher_command
from dsgpt.model.config import PRESETS
from dsgpt.record.suites import SCHEMA_VERSION, SWEEP_FILE, State, Turn

DEVICES, REPEATS, LIMIT_SEC, SEED = (1, 2), 3, 900, 1337
MODEL_SIZE, STEPS, SEQ_LENGTH, VAL_STEPS = "demo", 30, 128, 2
TRAIN_DATA, RECIPE = "--train_data_path", "--deepspeed_config"
PARTS = ("train", "validation")
RUN = "run"
"""The run folder of a turn, below the turn's."""
PACKAGE = Path(__file__).parents[2]


def default_output(suite: str) -> Path:
    """The record of a suite, if no other is named."""
    return Path("checkpoint") / "sweep" / Path(suite).stem / SWEEP_FILE


def _suite(word: str) -> str:
    """Reads the name of a suite, or the path of a description."""
    if word not in SUITES and not word.endswith(".json"):
        raise Unfit(f"must be one of {', '.join(SUITES)}, or a .json file, not {word}{did_you_mean(word, SUITES)}")
    return word


@dataclass(frozen=True, kw_only=True)
class SweepOptions(frame.SuiteOptions):
    """The command line of ``run``."""

    keep: None = None  # its work stands beside the record
    output: Path = flag(Path, "RECORD", f"the record to write (default: {default_output('SUITE')})")
    suite: str = flag(_suite, "SUITE", f"{', '.join(SUITES)}, or a description, a .json file")
    devices: tuple[int, ...] | None = flag(
        value(
            lambda text: tuple(int(word) if word.isdecimal() else 0 for word in text.split(",")),
            accepts=all,
            must_be="whole numbers of at least 1 with commas between them",
        ),
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
    profile_comm: int = flag(
        COUNT, "N", "steps of each training that measure communication (default: %(default)s)", default=0
    )
    target_loss: float | None = flag(NUMBER, "X", "measure the time until a step has this training loss")
    price: float | None = flag(NUMBER, "X", "price of a device hour, for the cost of a training")
    device: str = frame.device_flag("cpu or cuda")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The command line of ``compare``."""

    description: ClassVar[str] = """\
compare: is B slower than A? A and B are two runs, paired by step, or two sweeps, paired by repeat; SWEEP#CELL names one
cell. It prints the difference with its interval. Exit code 0: B is as fast as A within noise, or faster; 1: it is
slower beyond noise."""
    examples: ClassVar[str] = """\
examples:
  .venv/bin/python src/benchmark.py compare checkpoint/before checkpoint/after
  .venv/bin/python src/benchmark.py compare before/sweep.json after/sweep.json
  .venv/bin/python src/benchmark.py compare "sweep.json#ddp on 2 devices" "sweep.json#zero1 on 2 devices\""""

    a: str = flag(str, "A", "a run folder or its record, or a sweep's record, with #CELL or without", name="a")
    b: str = flag(str, "B", "a run folder or its record, or a sweep's record, with #CELL or without", name="b")
    allow_unequal: bool = switch("compare tokens per second although the work is not the same")


def read_suite(suite: str, devices: Sequence[int] | None) -> Suite:
    """The suite of that name or in that file.

    Raises:
        UserError: the file or something in it is wrong, or the numbers of devices do not fit.
    """
    if suite in SUITES:
        return built_in(suite, devices=devices or DEVICES)
    return read_description(Path(suite), devices=devices)


class SweepSuite(frame.Suite[SweepOptions, Turn]):
    """Trains what is left of a sweep, and compares its cells."""

    name, record_of, schema_version, unit = frame.SWEEP, "sweeps", SCHEMA_VERSION, "training"
    flags, page, summary = SweepOptions, staticmethod(sweep_page), staticmethod(summary_lines)
    description = """\
run: train the cells of a suite, each in its own processes under the launcher that users use, again and again in a drawn
order; write what each setting costs. Cells that are compared do the same work, or are refused before anything runs. A
training that runs out of memory, is refused, fails or exceeds its limit is a result. An interrupted sweep is continued
by the same command. Exit code 0: every turn has a result."""
    examples = f"""\
examples:
  .venv/bin/python src/benchmark.py run --suite scaling --devices 1,2 --repeats 3
  .venv/bin/python src/benchmark.py run --suite memory --devices 2 --repeats 1
  .venv/bin/python src/benchmark.py run --suite my-sweep.json --output checkpoint/sweep/mine/sweep.json

suites: {", ".join(SUITES)}"""

    def __init__(self, options: SweepOptions, repository: Path) -> None:
        if options.suite is None:
            raise UserError(f"--suite is missing: name {', '.join(SUITES)} or a .json file")
        super().__init__(replace(options, output=options.output or default_output(options.suite)), repository)
        self._suite = read_suite(options.suite, options.devices)
        self._turns = ordered_turns(self._suite.cells, repeats=options.repeats, seed=options.seed)
        self._store = TurnStore(self.options.output.parent.resolve() / "work")
        self._data: Path | None = None

    def plan(self) -> int:
        return len(self._turns)

    def work_folder(self, held: ExitStack) -> Path:  # noqa: ARG002 - it stays
        """Beside the record, so that the next command finds the turns of this one."""
        return self._store.folder

    def begin(self) -> None:
        """Prepare the text, and refuse a suite whose cells do not do the same work."""
        plan = self._fingerprint()
        self._store.require(plan)
        if any(value_of(cell.flags, TRAIN_DATA) is None for cell in self._suite.cells):
            from dsgpt.benchmarks.cells import prepare_demo  # noqa: PLC0415 - numpy takes its time

            self._data = prepare_demo(self.repository, self.folder / "data")
        flags = {cell.name: self._flags(cell, self.folder / "planned") for cell in self._suite.cells}
        works = {
            cell.name: planned_work(cell, flags[cell.name], repository=self.repository) for cell in self._suite.cells
        }
        require_equal_work(self._suite, works)
        plan["data"] = {
            name: [work[f"{part} data"] for part in PARTS] if work else None for name, work in works.items()
        }
        self._store.require(plan)
        self._store.begin(plan)
        left = len(list(self._store.left(self._turns)))
        if left < len(self._turns):
            done = len(self._turns) - left
            self.console.say(f"{done} of {len(self._turns)} turns have results from before; {left} left")

    def results(self) -> Iterator[Turn]:
        for planned in self._turns:
            turn = self._store.result(planned)
            if turn is None:
                turn = self._train(planned)
                self._store.keep(planned, turn)
            yield self._with_time_to_target(turn, planned)

    def _with_time_to_target(self, turn: Turn, planned: PlannedTurn) -> Turn:
        """The turn with a figure that is read again, because the target is not a setting of the training."""
        from dsgpt.benchmarks.sweep_turns import time_to_loss  # noqa: PLC0415

        target = self.options.target_loss
        if target is None or turn.state != State.DONE:
            return turn
        return replace(turn, time_to_target_sec=time_to_loss(self._run_dir(planned), target))

    def _run_dir(self, planned: PlannedTurn) -> Path:
        return self._store.folder / planned.folder / RUN

    def _train(self, planned: PlannedTurn) -> Turn:
        from dsgpt.benchmarks.sweep_turns import (  # noqa: PLC0415
            train,
            turn_of,
        )

        folder, cell = self._store.folder / planned.folder, planned.cell
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted turn left
        run_dir = self._run_dir(planned)
        folder.mkdir(parents=True)
        script = str(self.repository / "src" / "gpt2.py")
        ending = train(
            [*launcher_command(cell.launcher, cell.devices), script, *self._flags(cell, run_dir)],
            log=folder / "log.txt",
            limit_sec=self.options.limit,
            cwd=self.repository,
            device=self.options.device,
        )
        turn = turn_of(planned, ending, run_dir)
        for checkpoint in run_dir.glob("step-*"):
            shutil.rmtree(checkpoint)  # twelve bytes per parameter, which nothing here reads
        return turn

    def _flags(self, cell: Cell, run_dir: Path) -> list[str]:
        """All flags of a cell's training; those of the cell come last, and count."""
        options = self.options
        values: dict[str, Any] = {
            "model_size": options.model_size,
            "seq_length": options.seq_length,
            "max_train_steps": options.steps,
            "max_val_steps": VAL_STEPS,
            "save_every": 0,
            "device": options.device,
            "profile_comm": options.profile_comm,
        }
        if self._data is not None:
            values |= {"train_data_path": self._data / "train.bin", "val_data_path": self._data / "val.bin"}
        words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        return [*words, "--no_inference", *cell.flags, "--checkpoint_path", str(run_dir)]

    def _fingerprint(self) -> dict[str, Any]:
        """What must be equal for turns of two commands to be one sweep. More repeats may be added."""
        options = self.options
        head = frame.record_head(SCHEMA_VERSION, device=options.device)
        sources = "".join(sha256_of(file) for file in sorted(PACKAGE.rglob("*.py")))
        return {
            "suite": self._suite.as_dict(),
            "settings": [
                *(options.model_size, options.steps, options.seq_length, options.device, options.profile_comm),
            ],
            "seed": options.seed,
            "limit": options.limit,
            "recipes": self._recipes(),
            "sources": hashlib.sha256(sources.encode()).hexdigest(),
            "software": head["env"],
            "machine": head["hardware"],
        }

    def _recipes(self) -> dict[str, str]:
        """The sha256 of every recipe that a cell names; empty for one that is missing."""
        named = {value_of(cell.flags, RECIPE) for cell in self._suite.cells} - {None}
        files = {str(name): self.repository / str(name) for name in named}
        return {name: sha256_of(file) if file.is_file() else "" for name, file in sorted(files.items())}

    def line(self, result: Turn, *, count: str, left: str) -> str:
        speed = "" if result.tokens_per_sec is None else f", {result.tokens_per_sec:,.0f} tokens per second"
        why = "" if result.message is None else f" ({result.message})"
        return f"{count} repeat {result.repeat}, {result.cell}: {result.state}{why}{speed}{left}"

    def record(self, results: Sequence[Turn]) -> frame.Record:
        """The sweep as ``reports.sweeps`` reads it."""
        from dsgpt.benchmarks.sweep_turns import cell_of, comparison_of, losses_of  # noqa: PLC0415

        options = self.options
        turns: Mapping[str, list[Turn]] = {
            cell.name: [turn for turn in results if turn.cell == cell.name] for cell in self._suite.cells
        }
        cells = [cell_of(cell, turns[cell.name], price=options.price) for cell in self._suite.cells]
        losses = {(planned.cell.name, planned.repeat): losses_of(self._run_dir(planned)) for planned in self._turns}
        comparisons = [comparison_of(plan, cells, losses=losses) for plan in self._suite.comparisons]
        return {
            "suite": self._suite.name,
            "seed": options.seed,
            "repeats": options.repeats,
            "limit_sec": options.limit,
            "target_loss": options.target_loss,
            "price_per_device_hour": options.price,
            "seconds": round(sum(turn.seconds for turn in results), 1),
            "cells": [asdict(cell) for cell in cells],
            "comparisons": [asdict(comparison) for comparison in comparisons],
        }

    def closing_lines(self, failures: Sequence[str]) -> list[str]:  # noqa: ARG002
        return [f"turns and logs: {self._store.folder}"]
