"""``benchmark.py clusters``: seeded faults of hosts and networks, what each run must show, and the page."""

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Any

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.cells import Cell
from dsgpt.benchmarks.faults import SAVE_EVERY, STEPS
from dsgpt.common.command_line import COUNT, NUMBER, flag, switch
from dsgpt.common.errors import UserError
from dsgpt.config.options import SAVE_MODES

# Which fault meets which run, and when; all of it follows from a seed.

FAULTS, SEED = 300, 24
RUNS = {
    name: Cell(strategy=name, ranks=2, accumulation=3 if name.startswith("pipeline") else 1)
    for name in ("ddp", "fsdp", "zero1", "zero2", "zero3", "pipeline2-zero1", "tensor2-zero1", "sequence2-zero1")
}
"""The strategies, each on two hosts with one rank."""
LAUNCHERS = {"ranks": 26, "torchrun": 8, "torchrun 1:2": 4, "torchrun.sh": 1, "run_hostfile.sh": 1}
"""Starters of the ranks, and their number of 40 faults. Ranks start each by itself, as ``srun`` starts them. Torchrun's
agent is forked, for two hosts or for one or two. The last two are scripts of ``launch/``: ``run_hostfile.sh`` is
DeepSpeed's launcher without ssh."""
LIMIT_SEC, DEFAULT_LIMIT_SEC = 10.0, 60.0
"""``--stall_timeout`` of the campaign, and of its last fault."""
PAUSE_SEC = 20
"""Seconds for which the shared folder does not answer."""
LOST, SLOW_MBIT = 0.03, 8.0
"""The share of the packets to a host that are lost, and the rate of a slow link."""
EVERY_SEC, STREAM_STEPS = 8.0, 200
"""Mean seconds between the preemptions of one run, and its steps."""
BOUND = 1e-4
"""Bound on losses, gradient norms and weights: sums have other orders where ranks were fewer for a while."""
NAMED = 0.95
"""The least share of culprits that must be named."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    what: str
    """What is done, for the page."""
    _: KW_ONLY
    named: str = ""
    """Regular expression with ``HOST`` and ``ADDRESS`` that the words about the culprit must match; empty if the run
    goes on, or stops because it was asked to, and accuses nobody."""
    ends: bool = True
    """Whether the run ends, and is started again."""
    hows: tuple[str, ...] = ("",)
    latest: float = 0.3
    """Latest moment of the fault, in seconds after the begin of the step, or of the rank that is struck again."""


NO_SPACE, FIRST = "No space left on device", r"rank \d+ on HOST was the first to compute"
STILL = (
    f"the FUSE process behind the shared folder is stopped for {PAUSE_SEC} s, and the limit is {DEFAULT_LIMIT_SEC:g} s"
)
GONE = r"rank \d+ on HOST\b|at (HOST|ADDRESS), does not answer"
KINDS = {
    "host killed": Kind("its link goes down and all its processes get SIGKILL, as when its power fails", named=GONE),
    "link cut": Kind("its link goes down; its processes live on", named=GONE),
    "link slow": Kind(f"{SLOW_MBIT:g} Mbit/s in both directions, from that step to the end", ends=False),
    "packets lost": Kind(f"{LOST:.0%} of the packets to it, from that step to the end", ends=False),
    "rank stopped": Kind("SIGSTOP", named=GONE),
    "disk full": Kind(
        "the file system of the shared folder has no free byte, until the run is started again", named=NO_SPACE
    ),
    "clock off": Kind("an hour ahead or behind, from the start", ends=False, hows=("+1h", "-1h")),
    "NaN": Kind(
        "its layers give NaN in that step, or the loss alone is NaN", named=FIRST, hows=("", "loss"), latest=0.0
    ),
    "folder stands still": Kind(STILL, ends=False),
    "preemption": Kind(
        "a spot notice on the host, SIGUSR1 or SIGTERM to its rank", hows=("spot notice", "SIGUSR1", "SIGTERM")
    ),
    "second fault": Kind(
        "a host is killed, and one of the two is killed again within 2 s of the restart", named=GONE, latest=2.0
    ),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of the campaign."""

    index: int
    kind: str
    """A key of ``KINDS``."""
    how: str
    strategy: str
    """A key of ``RUNS``."""
    launcher: str
    """A key of ``LAUNCHERS``."""
    host: int
    """The number of the host that it strikes."""
    step: int
    """Step in which it strikes."""
    delay: float
    """Seconds after the begin of that step."""
    save_mode: str
    second: int | None = None
    """The host that is killed ``delay`` after its rank was started again; the first one is killed at once."""
    limit_sec: float = LIMIT_SEC
    every_sec: float = 0.0
    """Mean seconds between faults that strike again and again, at random; 0 if it strikes once."""

    @property
    def strikes(self) -> bool:
        """Whether it begins in a step, and not before the run."""
        return self.kind != "clock off"

    @property
    def name(self) -> str:
        """The name in console lines and on the page."""
        what = f"{self.kind} ({self.how})" if self.how else self.kind
        if self.every_sec:
            return f"{self.index}: {what} every {self.every_sec:g} s, {self.strategy}, {self.launcher}"
        return f"{self.index}: {what} on host {self.host}, {self.strategy}, {self.launcher}, step {self.step}"


def drawn(index: int, *, seed: int) -> Fault:
    """The fault ``index`` of a campaign; the kinds take turns."""
    chance, kind = random.Random(f"{seed}/{index}"), list(KINDS)[index % len(KINDS)]
    launchers = dict(LAUNCHERS)
    strategy = chance.choice(list(RUNS))
    if strategy.startswith(("pipeline", "tensor", "sequence")):  # their ranks cannot change
        del launchers["torchrun 1:2"]
    if strategy in {"ddp", "fsdp"}:
        del launchers["run_hostfile.sh"]
    if kind == "clock off":  # torchrun's agents compare their clocks, and one that is an hour off never joins
        launchers = {name: weight for name, weight in launchers.items() if not name.startswith("torchrun")}
    how = chance.choice(KINDS[kind].hows)
    if how == "loss" and strategy.startswith("pipeline"):  # only its last stage has one
        how = ""
    launcher = chance.choices(list(launchers), list(launchers.values()))[0]
    host, step = chance.randrange(2), chance.randrange(2, STEPS - 4)
    delay, save_mode = round(KINDS[kind].latest * chance.random(), 3), chance.choice(SAVE_MODES)
    second = chance.randrange(2) if kind == "second fault" else None
    limit_sec = DEFAULT_LIMIT_SEC if kind == "folder stands still" else LIMIT_SEC
    what: dict[str, Any] = {"index": index, "kind": kind, "how": how, "strategy": strategy, "launcher": launcher}
    when: dict[str, Any] = {"host": host, "step": step, "delay": delay, "second": second}
    return Fault(**what, **when, save_mode=save_mode, limit_sec=limit_sec)


def campaign(count: int, *, seed: int) -> list[Fault]:
    """``count`` faults, one with the limit that users have, and a run that is preempted again and again."""
    what: dict[str, Any] = {"kind": "rank stopped", "how": "", "strategy": "zero1", "launcher": "ranks", "host": 1}
    usual = Fault(index=count, **what, step=9, delay=0.0, save_mode="sync", limit_sec=DEFAULT_LIMIT_SEC)
    stream = replace(usual, index=count + 1, kind="preemption", how="SIGTERM", step=0, every_sec=EVERY_SEC)
    return [*(drawn(index, seed=seed) for index in range(count)), usual, stream]


@dataclass(kw_only=True)
class Outcome:
    """Result of one fault."""

    wrong: str = ""
    """Every check that failed, in words."""
    not_run: str = ""
    """Why this machine cannot cause it."""
    named: bool | None = None
    """Whether the culprit was named; None where nobody is at fault."""
    detect_sec: float | None = None
    """Seconds from the fault to the line that names the culprit."""
    resume_sec: float | None = None
    """Seconds from that line, or from the fault, to the first step of the run that was started again."""
    steps_lost: int = 0
    """Steps that were taken again, in all."""
    restarts: int = 0
    loss_difference: float | None = None
    """Largest difference of a loss, gradient norm, rate or validation loss from the undisturbed run."""
    weight_difference: float | None = None
    """Largest difference of a weight."""
    goodput: dict[str, Any] | None = None
    """Goodput of the run's record; see ``docs/records.md``."""
    seconds: float = 0.0


# The page.

Row = Mapping[str, Any]


def clusters_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``Clusters.record`` makes it.
        source: the record's path, for the reader.
    """
    work, every = record["work"], record["faults"]
    faults = [fault for fault in every if fault["index"] < work["faults"]]
    usual = [fault for fault in every if fault["index"] >= work["faults"] and not fault["every_sec"]]
    kinds = {kind: [fault for fault in faults if fault["kind"] == kind] for kind in KINDS}
    facts = {"summary": "\n".join(summary_lines(record)), "same": BOUND, "limit": LIMIT_SEC}
    return frame.page_of(
        frame.filled("clusters", record, record_at=source, page="clusters-campaign", **facts),
        frame.section(
            "By kind of fault",
            ["fault", "what is done", "tried", "recovered", "named", "detected after", "resumed after", "steps lost"],
            [[kind, KINDS[kind].what, *_figures(rows)] for kind, rows in kinds.items() if rows],
            text=frame.filled("clusters-kinds", {}),
        ),
        frame.section(
            "By strategy and launcher",
            ["strategy", *LAUNCHERS],
            [[run, *(_recovered(faults, strategy=run, launcher=each) for each in LAUNCHERS)] for run in RUNS],
            text=frame.filled("clusters-launchers", {}),
        ),
        frame.section(
            "With the limit that users have",
            ["fault", "recovered", "named", "detected after", "resumed after", "steps lost"],
            [[fault["name"], *_figures([fault])[1:]] for fault in usual],
            text=f"`--stall_timeout` is {DEFAULT_LIMIT_SEC:g} s.",
        ),
        *(_goodput(fault) for fault in every if fault["goodput"]),
        _words("Not recovered", every, "wrong"),
        _words("Culprit not named", [fault | {"why": "nobody"} for fault in every if fault["named"] is False], "why"),
        _words("Not run", every, "not_run"),
    )


def _goodput(fault: Row) -> str:
    goodput = fault["goodput"]
    seconds = {"steps that were kept": goodput["kept_sec"]} | goodput["lost_sec"]
    return frame.section(
        "Goodput under a stream of preemptions",
        ["seconds of", "s", "share"],
        [[what, f"{each:.1f}", f"{each / goodput['wall_sec']:.0%}"] for what, each in seconds.items()],
        text=frame.filled("clusters-stream", fault, steps=STREAM_STEPS),
    )


def _words(title: str, faults: Sequence[Row], key: str) -> str:
    return frame.listed(title, [f"{fault['name']}: {fault[key].splitlines()[0]}" for fault in faults if fault[key]])


def _ran(faults: Sequence[Row], **choice: str) -> list[Row]:
    chosen = [fault for fault in faults if all(fault[key] == value for key, value in choice.items())]
    return [fault for fault in chosen if not fault["not_run"]]


def _share(values: Sequence[bool]) -> str:
    return f"{sum(values)} of {len(values)}" if values else ""


def _recovered(faults: Sequence[Row], **choice: str) -> str:
    return _share([not fault["wrong"] for fault in _ran(faults, **choice)])


def _known(faults: Sequence[Row], key: str) -> list[Any]:
    """The values of ``key`` of the faults that have one."""
    return [fault[key] for fault in faults if fault[key] is not None]


def _figures(faults: Sequence[Row]) -> list[Any]:
    """The columns from ``tried`` on."""
    ran = _ran(faults)
    seconds = [_known(ran, key) for key in ("detect_sec", "resume_sec")]
    times = [f"{statistics.median(each):.1f} s, {max(each):.1f} s" if each else "" for each in seconds]
    lost = max((fault["steps_lost"] for fault in ran), default=0)
    return [len(ran), sum(not fault["wrong"] for fault in ran), _share(_known(ran, "named")), *times, lost]


def summary_lines(record: frame.Record) -> list[str]:
    """The figures of the page's summary."""
    ran = _ran(record["faults"])
    left_out = len(record["faults"]) - len(ran)
    rest = f" This machine could not cause {left_out} more." if left_out else ""
    guilty, most = _known(ran, "named"), max(_known(ran, "weight_difference"), default=None)
    lines = [f"* **{_recovered(ran)} faults** were recovered.{rest}"]
    lines.append(f"* The culprit was named in **{sum(guilty)} of {len(guilty)}** faults that have one.")
    if most is not None:
        lines.append(f"* The largest difference of a final weight from the undisturbed run's is {most:.1g}.")
    return lines


# The suite.


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(frame.SuiteOptions):
    """The command line."""

    faults: int = flag(COUNT, "N", "how many faults (default: %(default)s)", default=FAULTS)
    seed: int = flag(COUNT, "N", "seed that draws them (default: %(default)s)", default=SEED)
    only: tuple[str, ...] = frame.only_flag("KIND", "kinds of faults")
    minutes: float = flag(NUMBER, "MIN", "begin no fault after this time (default: %(default)g)", default=40.0)
    at_once: int = flag(COUNT, "N", default=4)
    """runs at the same time; most of the time they wait (default: %(default)s)"""
    again: bool = switch("repeat the faults of the record that were not recovered, too")


class Clusters(frame.Suite[ClusterOptions, tuple[Fault, Outcome]]):
    """Disturbs runs on two hosts, and starts them again.

    clusters: train on two hosts, which are network namespaces. Kill hosts, cut and slow links, lose packets, stop
    ranks, fill disks, change clocks, compute NaN, stop the shared folder, preempt, and kill again while a run recovers.
    All is drawn from a seed. Every run must end with the weights of an undisturbed one. A repeated command with the
    same --output continues the campaign. Needs root; iptables, bindfs and faketime. Exit code 0: all recovered, and at
    least 95% of the culprits were named; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py clusters
      .venv/bin/python src/benchmark.py clusters --faults 33 --seed 1 --minutes 10
      .venv/bin/python src/benchmark.py clusters --only "link cut" --at_once 1
    """

    name, record_of, schema_version, unit = "clusters", "the campaign of cluster faults", "1.0", "fault"
    counted, drains = "faults", True
    flags, page, summary = ClusterOptions, staticmethod(clusters_page), staticmethod(summary_lines)

    def plan(self) -> int:
        options = self.options
        chosen, seed = frame.selected(KINDS, options.only), self.earlier.get("seed", options.seed)
        if seed != options.seed:
            raise UserError(f"--output {options.output}: has faults of seed {seed}: give that one, or another file")
        earlier = self.earlier.get("faults", ())
        self._earlier = [fault for fault in earlier if not (options.again and fault["wrong"])]
        done = {fault["index"] for fault in self._earlier}
        every = campaign(options.faults, seed=options.seed)
        self._faults = [fault for fault in every if fault.kind in chosen and fault.index not in done]
        return len(self._faults)

    def begin(self) -> None:
        from dsgpt.benchmarks.clusters_runs import ClusterRuns  # noqa: PLC0415 - torch takes seconds

        self._runs = ClusterRuns(self.folder, repository=self.repository)
        self.console.say(f"{len(self._faults)} faults; {len(self._earlier)} are in {self.options.output} already")

    def results(self) -> Iterator[tuple[Fault, Outcome]]:
        options, waiting = self.options, iter(self._faults)
        end = time.monotonic() + 60 * options.minutes
        with ThreadPoolExecutor(options.at_once) as pool, self._runs:
            running: dict[Future[Outcome], Fault] = {}
            while True:
                while len(running) < options.at_once and time.monotonic() < end and (fault := next(waiting, None)):
                    running[pool.submit(self._runs.attempt, fault)] = fault
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()

    def line(self, result: tuple[Fault, Outcome], *, count: str, left: str) -> str:
        fault, outcome = result
        word = "FAILED" if outcome.wrong else "not run" if outcome.not_run else "recovered"
        word += ", NOT NAMED" if outcome.named is False else ""
        because = (outcome.wrong or outcome.not_run).splitlines()[:1]
        return f"{count} {fault.name}: {word} ({outcome.seconds:.1f} s{left}){''.join(f': {one}' for one in because)}"

    def record(self, results: Sequence[tuple[Fault, Outcome]]) -> frame.Record:
        new = [asdict(fault) | {"name": fault.name} | asdict(outcome) for fault, outcome in results]
        faults = sorted([*self._earlier, *new], key=lambda fault: fault["index"])
        work = {"faults": self.options.faults, "steps": STEPS, "save_every": SAVE_EVERY} | frame.work_facts("cpu")
        return {"work": work, "seed": self.options.seed, "faults": faults}

    def failures(self, record: frame.Record) -> list[str]:
        guilty = _known(record["faults"], "named")
        unnamed = [f"{sum(guilty)} of {len(guilty)} named"] if sum(guilty) < NAMED * len(guilty) else []
        return [fault["name"] for fault in record["faults"] if fault["wrong"]] + unnamed
