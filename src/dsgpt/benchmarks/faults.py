"""``benchmark.py faults``: what is killed when, and the page of the campaign."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.cells import Cell, by
from dsgpt.common.command_line import COUNT, NUMBER, flag, switch
from dsgpt.config.options import SAVE_MODES

STEPS, SAVE_EVERY = 24, 4
"""Steps of every run of the campaign, and steps between its checkpoints."""
# Which process of which run is killed, and when; all of it follows from a seed.

DROPOUT = 0.1
"""Share of dropout, not 0, so that a random stream that was not restored shows in the losses."""
KILLS, SEED = 200, 4
RUNS = {
    "baseline": Cell(strategy="baseline", ranks=1, accumulation=1),
    "ddp": Cell(strategy="ddp", ranks=2, accumulation=3),
    "zero1": Cell(strategy="zero1", ranks=2, accumulation=1),
    "zero3": Cell(strategy="zero3", ranks=2, accumulation=3),
    "pipeline2": Cell(strategy="pipeline2-zero1", ranks=2, accumulation=3),
    "fsdp": Cell(strategy="fsdp", ranks=4, accumulation=3),
    "fsdp-offload": Cell(strategy="fsdp-offload", ranks=2, accumulation=3),
    "zero0": Cell(strategy="zero0", ranks=2, accumulation=1),
    "zero2": Cell(strategy="zero2", ranks=4, accumulation=3),
    "zero2-offload": Cell(strategy="zero2-offload", ranks=2, accumulation=3),
    "zero3-offload": Cell(strategy="zero3-offload", ranks=2, accumulation=1),
    "zero3-nvme": Cell(strategy="zero3-nvme", ranks=2, accumulation=3),
    "tensor2": Cell(strategy="tensor2-zero1", ranks=2, accumulation=3),
    "sequence2": Cell(strategy="sequence2-zero3", ranks=4, accumulation=1),
    "pipeline2 on 8": Cell(strategy="pipeline2-zero0", ranks=8, accumulation=3),
    "3d": Cell(strategy="pipeline2-tensor2-zero1", ranks=8, accumulation=3),
}
"""The runs that are disturbed, by the name that pages and lines use."""
VICTIMS = ("one rank", "all", "the launcher")
KILL_MOMENTS = ("training", "saving")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """``kill -9`` of one or more processes of a run at an instant."""

    run: str
    """A key of ``RUNS``."""
    victim: str
    """Process that is killed, one of ``VICTIMS``; a baseline is one process and has no launcher."""
    rank: int
    """Number of the rank, if the victim is one rank."""
    moment: str
    """Moment, one of ``MOMENTS``: while steps run, or while a checkpoint is written."""
    step: int
    """The kill comes after this step; or while its checkpoint is written, and then it is a multiple of
    ``SAVE_EVERY``."""
    fraction: float
    """Position in the next step, or in the save, 0 to 1."""
    save_mode: str

    @property
    def killed(self) -> str:
        """The victim, with the number of a rank."""
        return f"rank {self.rank}" if self.victim == "one rank" else self.victim

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        when = f"in the save of step {self.step}" if self.moment == "saving" else f"after step {self.step}"
        return f"{self.run}: {self.killed} {when} + {self.fraction:.2f}, {self.save_mode}"


def seeded_kills(count: int = KILLS, *, seed: int = SEED) -> list[Kill]:
    """``count`` kills, the same for the same seed; all runs, victims, moments and save modes take turns."""
    chance, kills = random.Random(seed), list[Kill]()
    for number in range(count):
        turn, place = divmod(number, len(RUNS))
        run, moment = list(RUNS)[place], KILL_MOMENTS[turn % 2]
        victim = "one rank" if run == "baseline" else VICTIMS[(turn + place) % 3]
        rank, save_mode = chance.randrange(RUNS[run].ranks), SAVE_MODES[(turn // 2 + place) % 2]
        step = chance.choice(range(SAVE_EVERY, STEPS, SAVE_EVERY) if moment == "saving" else range(1, STEPS - 1))
        when: dict[str, Any] = {"moment": moment, "step": step, "fraction": chance.random()}
        kills.append(Kill(run=run, victim=victim, rank=rank, save_mode=save_mode, **when))
    return kills


def core_kills() -> list[Kill]:
    """The kills of ``make test``: each victim once, both moments."""
    return [
        Kill(run="ddp", victim="one rank", rank=1, moment="training", step=9, fraction=0.5, save_mode="async"),
        Kill(run="zero1", victim="all", rank=0, moment="saving", step=8, fraction=0.4, save_mode="sync"),
        Kill(run="pipeline2", victim="the launcher", rank=0, moment="training", step=6, fraction=0.2, save_mode="sync"),
    ]


# How one fault of the campaign ended.

KINDS = ("kill", "request", "damage", "disk", "machine", "launch")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one fault."""

    kind: str = ""
    """Kind of fault, one of ``KINDS``; ``try_faults`` sets it, the name and the seconds."""
    name: str = ""
    """Description of the fault and the run."""
    wrong: str = ""
    """Every check that failed, in words; empty if all passed."""
    not_run: str = ""
    """Why this machine cannot run it; empty if it was run."""
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    """Lines that the run printed about the fault; in the end without the paths of this machine."""

    @property
    def status(self) -> str:
        """``passed``, ``failed`` or ``not run``."""
        return "not run" if self.not_run else "failed" if self.wrong else "passed"


def all_wrong(*findings: tuple[bool, str]) -> str:
    """The messages of the findings that are true, joined; empty if none is."""
    return "; ".join(words for holds, words in findings if holds)


def first_error(output: str) -> str:
    """The first line with an error; launchers print many lines after it."""
    lines = [line.strip() for line in output.splitlines()]
    return next((line for line in lines if "rror: " in line or line.startswith("error: ")), output[-300:])


STATUS_WORDS = {"passed": "yes", "failed": "**NO**", "not run": "not run"}


def faults_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.faults`` makes it.
        source: the record's path, for the reader.
    """
    faults, each = record["faults"], record["work"]["runs"].items()
    runs = "\n".join(f"* `{name}`: {run['executed_by']}, accumulation {run['accumulation']}" for name, run in each)
    head = frame.filled("faults", record, record_at=source, summary=_summary(record), runs=runs)
    kinds = {kind: [fault for fault in faults if fault["kind"] == kind] for kind in KINDS}
    others = [fault for kind in ("damage", "disk", "machine", "launch") for fault in kinds[kind]]
    return frame.page_of(
        head,
        _kills(kinds["kill"], record),
        frame.section(
            "Signals",
            ["signal", "exit code", "all ended after", "steps lost", "what the run printed", "passed"],
            [_row(fault, "exit_code", "gone_sec", "steps_lost") for fault in kinds["request"]],
            text=frame.filled("faults-signals", record),
        ),
        frame.section(
            "Damaged files, disks that refuse writes, other machines, launches",
            ["fault", "exit code", "resumed from step", "what the run printed", "recovered"],
            [_row(fault, "exit_code", "resumed_from") for fault in others],
            text=frame.filled("faults-others", record),
        ),
        frame.troubles(faults, STATUS_WORDS),
    )


def summary_lines(record: frame.Record) -> list[str]:
    """The figures of the page's summary, for a console."""
    return [line.strip() for line in _summary(record).splitlines()]


def _summary(record: frame.Record) -> str:
    ran = [fault for fault in record["faults"] if fault["status"] != "not run"]
    left_out = len(record["faults"]) - len(ran)
    rest = f" This machine could not run {left_out} more." if left_out else ""
    if left := record.get("planned", 0) - len(record["faults"]):
        rest += f" {left} are not tried yet."
    kills = [fault for fault in record["faults"] if fault["kind"] == "kill"]
    lines = [f"* **{_passed(ran)} of {len(ran)} faults** ended as they should.{rest}"]
    if facts := [kill["measured"] for kill in kills if kill["measured"]]:
        cut, every = sum(one["save_cut_off"] for one in facts), record["work"]["save_every"]
        lost, gone = (max(one[key] for one in facts) for key in ("steps_lost", "gone_sec"))
        lines += [
            f"* After **{_passed(kills)} of {len(kills)} kills**, `--resume` recovered the run; {cut} of them",
            f"  interrupted a save. At most {lost} steps had to be repeated, with a checkpoint every {every} steps.",
            f"  The last process ended at most {gone:.1f} s after the kill.",
        ]
        if ended := [one["launcher_sec"] for one in facts if one["launcher_outlived_victim"]]:
            lines.append(f"* A launcher whose rank was killed ended with an error, at most {max(ended):.1f} s later.")
    return "\n".join(lines)


def _passed(faults: list[dict[str, Any]]) -> int:
    return sum(fault["status"] == "passed" for fault in faults)


def _kills(kills: list[dict[str, Any]], record: frame.Record) -> str:
    header = ["run", "`kill -9` of", "aimed at", "interrupted a save", "`--save_mode`", "steps taken", "resumed from"]
    header += ["lost", "allowed", "exit code", "launcher ended after", "all ended after", "recovered"]
    keys = ["run", "victim", "aimed_at", "save_cut_off", "save_mode", "steps_taken", "resumed_from", "steps_lost"]
    keys += ["steps_allowed", "exit_code", "launcher_sec", "gone_sec"]
    ran = [kill for kill in kills if kill["measured"]]
    rows = [[*(_figure(kill, key) for key in keys), STATUS_WORDS[kill["status"]]] for kill in ran]
    return frame.section("Kills", header, rows, text=frame.filled("faults-kills", record))


def _row(fault: dict[str, Any], *keys: str) -> list[Any]:
    printed = "<br>".join(f"`{' '.join(line.split())}`" for line in fault["said"])
    return [fault["name"], *(_figure(fault, key) for key in keys), printed, STATUS_WORDS[fault["status"]]]


def _figure(fault: dict[str, Any], key: str) -> Any:
    value = fault["measured"].get(key)
    if isinstance(value, bool):
        return "yes" if value else ""
    return f"{value:.1f} s" if key.endswith("_sec") and value is not None else value


@dataclass(frozen=True, kw_only=True)
class FaultOptions(frame.SuiteOptions):
    """The command line."""

    kills: int = flag(COUNT, "N", "how many kills (default: %(default)s)", default=KILLS)
    seed: int = flag(COUNT, "N", default=SEED)
    """seed that draws victims and instants (default: %(default)s, as in docs/faults.md)"""
    core: bool = switch("only what `make test` runs")
    minutes: float = flag(NUMBER, "MIN", "begin no fault after this time (default: %(default)g)", default=40.0)


class Faults(frame.Suite[FaultOptions, Outcome]):
    """Disturbs runs and resumes them.

    faults: kill ranks, launchers and whole runs at seeded instants, send signals, damage checkpoints, fill the disk;
    then resume every run, which must end with the losses of an undisturbed run, to the last bit. Exit code 0: they all
    do; 1: otherwise. A repeated command with the same --output continues.

    Examples:
      .venv/bin/python src/benchmark.py faults
      .venv/bin/python src/benchmark.py faults --kills 40 --seed 1 --output checkpoint/faults/seed-1.json
      .venv/bin/python src/benchmark.py faults --table-from checkpoint/faults/faults.json
    """

    name, record_of, unit, counted = "faults", "the fault campaign", "fault", "faults"
    flags, page, summary = FaultOptions, staticmethod(faults_page), staticmethod(summary_lines)

    def plan(self) -> int:
        from dsgpt.benchmarks.faults_kinds import all_faults, core_faults  # noqa: PLC0415 - torch takes seconds

        options = self.options
        self._faults = core_faults() if options.core else all_faults(kills=options.kills, seed=options.seed)
        passed = [one for one in self.earlier.get("faults", ()) if one["status"] == "passed"]
        self._earlier = self.kept(passed, [fault.name for fault in self._faults])
        self._todo = [fault for fault in self._faults if fault.name not in self._earlier]
        return len(self._todo)

    def begin(self) -> None:
        from dsgpt.benchmarks.faults_runs import Runs  # noqa: PLC0415

        self._runs = Runs(self.folder, repository=self.repository)
        done = f"; {len(self._earlier)} are in {self.options.output} already" if self._earlier else ""
        self.console.say(f"{len(self._todo)} faults; each run is first trained undisturbed{done}")

    def results(self) -> Iterator[Outcome]:
        from dsgpt.benchmarks.faults_kinds import try_faults  # noqa: PLC0415

        return try_faults(self._runs, self._todo)

    def line(self, result: Outcome, *, count: str, left: str) -> str:
        word = {"passed": "recovered", "failed": "FAILED", "not run": "not run"}[result.status]
        because = "".join(f": {reason}" for reason in (result.wrong or result.not_run).splitlines()[:1])
        return f"{count} {result.name}: {word} ({result.seconds:.1f} s{left}){because}"

    def record(self, results: Sequence[Outcome]) -> frame.Record:
        runs = {name: {"executed_by": by(cell), "accumulation": cell.accumulation} for name, cell in RUNS.items()}
        work = {"steps": STEPS, "save_every": SAVE_EVERY, "dropout": DROPOUT} | frame.work_facts("cpu") | {"runs": runs}
        ended = {one.name: asdict(one) | {"status": one.status, "seconds": round(one.seconds, 2)} for one in results}
        every = self._earlier | ended
        return {
            "work": work,
            "seed": self.options.seed,
            "planned": len(self._faults),
            "faults": [every[fault.name] for fault in self._faults if fault.name in every],
        }

    def failures(self, record: frame.Record) -> list[str]:
        left = record["planned"] - len(record["faults"])
        failed = [fault["name"] for fault in record["faults"] if fault["status"] == "failed"]
        return [*failed, *([f"{left} faults, which are not tried yet"] if left else [])]
