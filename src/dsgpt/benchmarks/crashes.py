"""``benchmark.py crashes``: every legal state of a disk after a power cut, opened by the code that resumes a run."""

import math
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsgpt.benchmarks import crashes_disk as disks
from dsgpt.benchmarks import frame
from dsgpt.benchmarks.cells import STRATEGIES, CellRunner
from dsgpt.benchmarks.faults import RUNS, STEPS
from dsgpt.benchmarks.launch import Assignment
from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST, STATE_FILE, FileFacts
from dsgpt.common.command_line import COUNT, POSITIVE, flag
from dsgpt.common.errors import UserError
from dsgpt.common.files import remove, write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.common.text import bullets
from dsgpt.record.schema import COMPLETE_FILE, STEPS_FILE, drop_steps_after, read_steps

if TYPE_CHECKING:
    from dsgpt.benchmarks.faults_runs import Runs
    from dsgpt.config.run_config import RunConfig
    from dsgpt.training.run import Prepared

# What runs do while they are traced, and the bugs that are planted in them.

FINISHED, DAMAGED, NOT_VALIDATED = "finished", "damaged", "not validated"
"""What lies in a run folder before: a finished run; one whose newest checkpoint is damaged, or whose last one was saved
without its validation."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run whose writes are recorded."""

    run: str = "baseline"
    """A key of ``faults.RUNS``."""
    flags: tuple[str, ...] = ("--save_every", "8")
    before: str = ""
    """Empty for no folder."""
    plant: str = ""
    """Python that plants a bug; some state must show it."""


SCENARIOS = {
    "save": Scenario(),
    "asynchronous save": Scenario(flags=("--save_every", "8", "--save_mode", "async")),
    "sharded save": Scenario(run="ddp"),
    "retention": Scenario(flags=("--keep_checkpoints", "1")),
    "overwrite": Scenario(flags=("--save_every", "8", "--overwrite"), before=FINISHED),
    "resume": Scenario(flags=("--resume",), before=DAMAGED),
    "replaced checkpoint": Scenario(flags=("--resume",), before=NOT_VALIDATED),
}
_ONLY = "os.fsync = lambda at, real=os.fsync: stat.S_IS{}(os.fstat(at).st_mode) and real(at)"
_LATE = """
import dsgpt.checkpoints.store as store
real, tidy = os.fsync, store.keep_newest
def then(run_dir, **more):
    for path in store.checkpoints(run_dir)[0].glob("*.safetensors"):
        real(os.open(path, os.O_RDONLY))
    tidy(run_dir, **more)
os.fsync = lambda at: os.readlink(f"/proc/self/fd/{at}").endswith(".safetensors") or real(at)
store.keep_newest = then"""
_EARLY = """
import dsgpt.checkpoints.store as store
def early(folder, real=store.set_aside, **more):
    store.write_atomic(folder.parent / "latest", folder.name.encode())
    return real(folder, **more)
store.set_aside = early"""
PLANTS = {
    "files without fsync": _ONLY.format("DIR"),
    "folders without fsync": _ONLY.format("REG"),
    "manifest durable before the data": _LATE,
    "latest before the rename": _EARLY,
}
_PLANTED = "import os, stat, sys, runpy\n{}\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
SCENARIOS |= {name: Scenario(plant=plant) for name, plant in PLANTS.items()}

# The oracle: which checkpoints a run made and announced, and how a resume answers a state.

NEWEST, NEWER, FRESH = "newest announced", "newer, not announced yet", "fresh start, none announced"
EARLIER_RUN = "run before --overwrite, whole"
RIGHT = (NEWEST, NEWER, FRESH, EARLIER_RUN)
LOST, MIXED, HALF = "announced and lost", "other contents", "half a checkpoint under its name"
REFUSED, TRACEBACK, LINES, FALSE_ALARM = "refused", "traceback", "step lines or record missing", "false alarm"
_ANNOUNCED = re.compile(r"step +(\d+)/\d+  saved in ")
_ALARM = re.compile(r"does not exist|is refused|damaged")
_STEPS = re.compile(rf"run/({store.STEP_FOLDER.pattern})")


@dataclass(kw_only=True)
class Truth:
    """The checkpoints of a trace."""

    published: dict[tuple[str, str], float]
    """When each got its name, by name and digest; those from before in their order, before everything."""
    announced: list[tuple[float, float]]
    """When the user read of a checkpoint, and when it had got its name."""
    damaged: list[str]
    """Names of checkpoints that were damaged before."""

    def floor(self, moment: float) -> float:
        """When the newest one that was announced before ``moment`` got its name; minus infinity if none was."""
        return max((published for time, published in self.announced if time < moment), default=-math.inf)


def truth_of(trace: disks.Trace, *, overwrites: bool, damaged: list[str]) -> Truth:
    """The checkpoints that ``trace`` made; with ``overwrites`` those from before need not survive."""
    earlier = [name for name in _folders(trace.before) if name not in damaged]
    published = {(name, _digest(trace.before, name)): at - 1e9 for at, name in enumerate(earlier)}
    announced = [] if overwrites or not earlier else [(-math.inf, max(published.values()))]
    disk = trace.start()
    for change in trace.changes:
        disk.apply(change)
        for name, inode in change.names.items():
            if inode is not None and store.STEP_FOLDER.fullmatch(name):
                published[name, disks.digest(disk.tree(inode))] = change.done
    for time, text in trace.said:
        for step in _ANNOUNCED.findall(text):
            own = [at for (name, _), at in published.items() if name == store.folder_name(int(step)) and at < time]
            announced.append((time, max(own)))
    return Truth(published=published, announced=announced, damaged=damaged)


def _folders(tree: disks.Tree) -> list[str]:
    return sorted(match[1] for match in map(_STEPS.fullmatch, tree) if match)


def _digest(tree: disks.Tree, name: str) -> str:
    return disks.digest(disks.below(tree, f"run/{name}"))


def judge(state: disks.State, truth: Truth, config: "RunConfig") -> tuple[str, str]:
    """How a resume answers a state, which is put on the disk, and what it said; torch is needed.

    Returns:
        One of ``RIGHT``, or what is wrong.
    """
    from dsgpt.machine.peers import Peers  # noqa: PLC0415 - imports torch
    from dsgpt.training.run import prepare  # noqa: PLC0415
    from dsgpt.training.run_folder import clear_run_folder  # noqa: PLC0415
    from dsgpt.training.status import RunLock  # noqa: PLC0415

    run_dir = config.run_dir
    put(state, run_dir)
    for name in _folders(state.tree):
        if (name, _digest(state.tree, name)) not in truth.published and name not in truth.damaged:
            return HALF, name
    try:
        with RunLock(run_dir) as lock:
            prepared = prepare(config, lock, Peers(config.topology, stall_timeout=config.options.stall_timeout))
            if run_dir.exists() and not prepared.start.finished:
                clear_run_folder(run_dir, prepared.start)
    except UserError as error:
        return REFUSED, str(error)
    except Exception as error:  # noqa: BLE001 - every traceback is a finding
        return TRACEBACK, f"{type(error).__name__}: {error}"
    return _answer(prepared, truth.floor(state.moment), truth, run_dir / STEPS_FILE)


def _answer(prepared: "Prepared", floor: float, truth: Truth, steps_file: Path) -> tuple[str, str]:
    """What a resume that has begun made of a state; ``floor`` is what it must find."""
    said, chosen = "; ".join(prepared.messages), prepared.start.checkpoint
    whole = truth.published.get((chosen.name, disks.digest(disks.read_tree(chosen)))) if chosen else None
    if any(_ALARM.search(line) and not any(name in line for name in truth.damaged) for line in prepared.messages):
        return FALSE_ALARM, said
    if chosen is None:
        return (FRESH if floor == -math.inf else LOST), said
    if whole is None or whole < floor:
        return (MIXED if whole is None else LOST), said
    step = store.step_of(chosen.name)
    drop_steps_after(steps_file, step)
    lines = [line["step"] for line in read_steps(steps_file) if "loss" in line]
    if lines != list(range(1, step + 1)) or prepared.earlier.saves is None:
        return LINES, f"{step} steps, {len(lines)} lines, {'no' if prepared.earlier.saves is None else 'a'} record"
    return (NEWEST if whole == floor else NEWER if whole > 0 else EARLIER_RUN), said


def put(state: disks.State, run_dir: Path) -> None:
    """Make the folder around ``run_dir`` what it is in ``state``."""
    remove(run_dir.parent)
    run_dir.parent.mkdir()
    disks.write_tree(state.tree, run_dir.parent)


# The suite.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the states of a scenario ended, or a whole command on one of them."""

    scenario: str
    command: bool = False
    states: int = 0
    """Distinct ones."""
    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    """How often a resume gave an answer, by what the disk lacked."""
    wrong: list[str] = field(default_factory=list)
    """Of each wrong answer the first, in words."""


@dataclass(frozen=True, kw_only=True)
class CrashOptions(frame.SuiteOptions):
    """The command line."""

    states: int = flag(POSITIVE, "N", default=12)
    """states tried at each moment of a cut; of more, so many are drawn (default: %(default)s)"""
    commands: int = flag(COUNT, "N", "states that whole trainings resume (default: %(default)s)", default=105)
    seed: int = flag(COUNT, "N", "draws states (default: %(default)s)", default=1)
    only: tuple[str, ...] = frame.only_flag("SCENARIO", "scenarios")


def crashes_page(record: frame.Record, *, source: str) -> str:
    """The page; ``source`` is the record's path, for the reader."""
    own = [one for one in record["scenarios"] if one["scenario"] not in PLANTS]
    kinds = Counter[tuple[str, str]]()
    for one in own:
        for kind, answers in one["answers"].items():
            kinds.update({(kind, "states"): sum(answers.values())})
            kinds.update({(kind, answer if answer in RIGHT else "wrong"): n for answer, n in answers.items()})
    header = ["states", *RIGHT, "wrong"]
    by_kind = [[kind, *(kinds[kind, word] for word in header)] for kind in sorted({kind for kind, _ in kinds})]
    rows = [[one["scenario"], one["states"], *(_count(one, word) for word in header[1:-1])] for one in own]
    rows = [[*row, one["wrong_states"], _commands(record, one["scenario"])] for row, one in zip(rows, own, strict=True)]
    planted = [
        [one["scenario"], one["states"], one["wrong_states"], "<br>".join(one["wrong"])]
        for one in record["scenarios"]
        if one["scenario"] in PLANTS
    ]
    return frame.page_of(
        frame.filled("crashes", record, record_at=source, summary=bullets(summary_lines(record))),
        frame.section("By scenario", ["scenario", *header, "whole commands"], rows),
        frame.section("By what the disk lacks", ["lacks", *header], by_kind),
        frame.section("Planted bugs", ["bug", "states", "wrong", "the first of each kind"], planted),
        frame.listed("Wrong", [f"{one['scenario']}: {line}" for one in own for line in one["wrong"]]),
        frame.listed("Wrong commands", [line for one in record["commands"] for line in one["wrong"]]),
    )


def _count(one: dict[str, Any], *words: str) -> int:
    """States of a scenario with one of these answers."""
    return sum(answers.get(word, 0) for answers in one["answers"].values() for word in words)


def _commands(record: frame.Record, scenario: str) -> str:
    every = [not one["wrong"] for one in record["commands"] if one["scenario"] == scenario]
    return f"{sum(every)} of {len(every)}" if every else ""


def summary_lines(record: frame.Record) -> list[str]:
    """The figures of the page's summary."""
    own = [one for one in record["scenarios"] if one["scenario"] not in PLANTS]
    planted = [one for one in record["scenarios"] if one["scenario"] in PLANTS]
    right = sum(one["states"] - one["wrong_states"] for one in own)
    commands = [not one["wrong"] for one in record["commands"]]
    return [
        f"{right:,} of {sum(one['states'] for one in own):,} distinct states were resumed as they should be.",
        f"{sum(commands)} of {len(commands)} whole commands trained on, to the losses of an undisturbed run.",
        f"{sum(one['wrong_states'] > 0 for one in planted)} of {len(planted)} planted bugs were noticed.",
    ]


class Crashes(frame.Suite[CrashOptions, Outcome]):
    """Cuts the power of recorded runs.

    crashes: record with strace what saves, retention, --overwrite and resumes do to a disk; make the states that a
    power cut may leave of it, by the model of ALICE; and resume each. Exit code 0: the newest announced checkpoint is
    always found whole, and every planted bug is noticed; 1: otherwise. Takes about half an hour. Needs strace (Debian:
    apt-get install strace).

    Examples:
      .venv/bin/python src/benchmark.py crashes
      .venv/bin/python src/benchmark.py crashes --only retention --commands 0
      .venv/bin/python src/benchmark.py crashes --table-from checkpoint/crashes/crashes.json
    """

    name, record_of, unit = "crashes", "the states after power cuts", "result"
    flags, page, summary = CrashOptions, staticmethod(crashes_page), staticmethod(summary_lines)
    names = f"scenarios: {', '.join(SCENARIOS)}"

    def plan(self) -> int:
        if not shutil.which("strace"):
            raise UserError("crashes needs strace, which records what a run writes: apt-get install strace")
        self._chosen = frame.selected(SCENARIOS, self.options.only)
        own = [name for name in self._chosen if name not in PLANTS]
        self._commands = dict.fromkeys(own, self.options.commands // max(1, len(own)))
        return len(self._chosen) + sum(self._commands.values())

    def begin(self) -> None:
        from dsgpt.benchmarks.faults_runs import Runs  # noqa: PLC0415 - torch takes seconds

        self._runs = Runs(self.folder, repository=self.repository)
        self._runner = CellRunner(self._runs.folder, repository=self.repository, device="cpu")

    def results(self) -> Iterator[Outcome]:
        for name, scenario in self._chosen.items():
            yield from self._tried(name, scenario)

    def _tried(self, name: str, scenario: Scenario) -> Iterator[Outcome]:
        """Trace a scenario and resume the states of its disk; then some of them by whole commands."""
        from dsgpt.config.options import parse_arguments  # noqa: PLC0415 - as above
        from dsgpt.config.run_config import resolve  # noqa: PLC0415
        from dsgpt.machine.topology import read_topology  # noqa: PLC0415

        runs, options, commands = self._runs, self.options, self._commands.get(name, 0)
        run_dir, damaged = _prepared(scenario, runs, name)
        before, file = disks.read_tree(run_dir.parent), runs.folder / f"{run_dir.parent.name}.strace"
        how: dict[str, Any] = {"prefix": (*disks.STRACE, str(file)), "log": disks.CONSOLE}
        how |= {"launcher": ("-c", _PLANTED.format(scenario.plant))} if scenario.plant else {}
        with runs.start(scenario.run, run_dir, *scenario.flags, **how) as one:
            if code := one.wait():
                raise UserError(f"the traced run of {name} ended with exit code {code}: {one.output()[-500:]}")
        trace = disks.read_trace(file, root=run_dir.parent, before=before)
        truth = truth_of(trace, overwrites=scenario.before == FINISHED, damaged=damaged)
        given, problems = parse_arguments([*runs.words("baseline", run_dir, {}), "--resume"])
        config = resolve(given, topology=read_topology({}), problems=problems)
        answers, wrong, chosen, chance = dict[str, Counter[str]](), dict[str, str](), [], random.Random(options.seed)
        for count, state in enumerate(disks.states(trace, seed=options.seed, most=options.states)):
            answer, said = judge(state, truth, config)
            answers.setdefault(state.kind, Counter())[answer] += 1
            if answer not in RIGHT:
                wrong.setdefault(answer, f"{answer} ({state.kind}): {said.replace(f'{run_dir.parent}/', '')[:300]}")
            if count < commands:
                chosen.append(state)
            elif (place := chance.randrange(count + 1)) < commands:
                chosen[place] = state
        counts = {kind: dict(each) for kind, each in answers.items()}
        total = sum(each.total() for each in answers.values())
        yield Outcome(scenario=name, states=total, answers=counts, wrong=list(wrong.values()))
        yield from self._trained_on(name, scenario.run, chosen)

    def _trained_on(self, name: str, run: str, chosen: Sequence[disks.State]) -> Iterator[Outcome]:
        """Resume ``run`` on some states to its end, in processes that are forked from one launch."""
        place = RUNS[run].ranks, STRATEGIES[RUNS[run].strategy].launcher

        def assigned(state: disks.State) -> Assignment:
            run_dir = self._runs.new(name)
            put(state, run_dir)
            flags = [*self._runs.words(run, run_dir, {}), "--resume"]
            return Assignment(folder=str(run_dir.parent), flags=flags, call="dsgpt.benchmarks.resume:train")

        for _, end in self._runner.run(chosen, place=lambda _: place, assign=assigned):
            wrong = end.message or self._runs.difference(run, end.folder / "run")
            yield Outcome(scenario=name, command=True, wrong=[f"{name}: {wrong}"] if wrong else [])

    def line(self, result: Outcome, *, count: str, left: str) -> str:
        how = "; ".join(result.wrong) or "as it should be"
        what = "a whole command" if result.command else f"{result.states:,} states"
        return f"{count} {result.scenario}: {what}: {how}{left}"

    def record(self, results: Sequence[Outcome]) -> frame.Record:
        parts = [asdict(one) for one in results]
        parts = [one | {"wrong_states": one["states"] - _count(one, *RIGHT)} for one in parts]
        return {
            "work": {"steps": STEPS, "states_at_a_moment": self.options.states, "seed": self.options.seed},
            "scenarios": [one for one in parts if not one["command"]],
            "commands": [one for one in parts if one["command"]],
        }

    def failures(self, record: frame.Record) -> list[str]:
        wrong = [one["scenario"] for one in record["scenarios"] if (one["scenario"] in PLANTS) != bool(one["wrong"])]
        return wrong + [one["scenario"] for one in record["commands"] if one["wrong"]]


def _prepared(scenario: Scenario, runs: "Runs", name: str) -> tuple[Path, list[str]]:
    """The run folder in which a scenario begins, and its damaged checkpoints."""
    if scenario.before == DAMAGED:
        run_dir = runs.rolled_back(scenario.run, name)
        newest = store.checkpoints(run_dir)[0]
        (newest / store.WEIGHTS).write_bytes(b"")
        return run_dir, [newest.name]
    if scenario.before:
        run_dir = runs.copied(scenario.run, name)
        if scenario.before == NOT_VALIDATED:  # as if it had been asked to stop in its last validation
            (run_dir / COMPLETE_FILE).unlink()
            newest = store.checkpoints(run_dir)[0]
            manifest, state = (read_object(newest / file) for file in (MANIFEST, STATE_FILE))
            write_json_atomic(newest / STATE_FILE, state | {"last_val_step": None, "last_val_loss": None})
            manifest["val_loss"] = None
            manifest["files"][STATE_FILE] = asdict(FileFacts.synced(newest / STATE_FILE))
            write_json_atomic(newest / MANIFEST, manifest)
        return run_dir, []
    return runs.new(name), []
