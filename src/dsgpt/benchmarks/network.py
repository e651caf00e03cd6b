"""``benchmark.py network``: training across hosts that have networks of their own.

Every strategy must compute on two and on four hosts what it computes on one; the scripts of ``launch/`` start it there.
Then the share of a step that waits for communication, over links of several speeds, stands beside the share that the
planner predicts. The hosts are network namespaces of this machine (``dsgpt.benchmarks.hosts``).
"""

import contextlib
import itertools
import os
import signal
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.cells import Cell, CellRunner, weights_apart, write_random_tokens
from dsgpt.benchmarks.hosts import TUN, Hosts, NoHosts, be_rank_on, made_hosts
from dsgpt.benchmarks.launch import ALL_IMPORTS, Assignment, config_of, train_rank, training_words
from dsgpt.benchmarks.plan import cells as plan_cells
from dsgpt.checkpoints import store
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.errors import UserError
from dsgpt.common.json_files import read_object
from dsgpt.common.text import grouped
from dsgpt.machine.topology import read_topology
from dsgpt.planner.rates import Calibration, calibrated_machine, read_calibration
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import predict_step
from dsgpt.record.schema import STEPS_FILE, read_steps

# What is trained.

HOSTS = (2, 4)
TORCHRUN, NO_SSH, SSH = "torchrun", "deepspeed without ssh", "deepspeed over ssh"
STRATEGIES = {
    "ddp": (4, TORCHRUN),
    "fsdp": (4, TORCHRUN),
    "zero1": (4, NO_SSH),
    "zero3": (4, SSH),
    "pipeline2-zero1": (4, SSH),
    "pipeline2-tensor2-zero1": (8, NO_SSH),
}
"""Number of ranks of each strategy, and its launcher."""
BOUND = 2e-4
"""Bound on each difference: sums in another order are within it."""
OVER_LINKS = {f"link-{name}": f"{name}-4x256-fp32-b4" for name in ("ddp", "fsdp", "zero1", "zero3")}
"""Cells of the suite ``plan`` on two ranks, here one on each of two hosts."""
RANKS = 2
LINKS: tuple[tuple[int, float], ...] = ((80, 0), (320, 0), (1280, 0), (5120, 0), (80, 10), (80, 50))
"""Megabits a second of a host's link, in each direction, and milliseconds by which it delays what the host sends."""
NO_LIMIT = (None, 0)


def links() -> list[tuple[int, float]]:
    """``LINKS``, without those that this machine cannot delay."""
    return [link for link in LINKS if not link[1] or TUN.exists()]


PROFILED = 2
FLAGS = {"max_train_steps": 5, "profile_comm": PROFILED, "max_val_steps": 1, "no_inference": True, "save_every": 0}
"""Flags of a training over links."""
FIRST_IN_LINE = "This measurement ran with real-time priority (chrt), because other programs used the machine."
CALIBRATION_SEC, LIMIT_SEC = 20.0, 300.0
TOKENS = 200_000


# The page.


def network_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.network`` makes it.
        source: the record's path, for the reader.
    """
    spread, points = list[list[object]](), list[list[object]]()
    for one in record["trainings"]:
        off = ["none" if each is None else f"{each:.1e}" if each else "0" for each in one["differences"].values()]
        spread += [[*(one[key] for key in ("strategy", "ranks", "hosts", "started_by")), *off]] if off else []
    for one in record["points"]:
        link = [one["strategy"], f"{one['mbit']:,}", f"{one.get('delay_ms', 0):g}"]
        shares = [f"{one['predicted_share']:.1%}", frame.span_words(one["share"], ".1%"), f"{one['off'] * 100:+.1f}"]
        points.append([*link, *shares, f"{one['predicted_step_sec']:.2f}", frame.span_words(one["step_sec"], ".2f")])
    on_links = frame.filled("network-links", {"remark": "", **record}, profiled=PROFILED).rstrip()
    words = {"error": "**ERROR**", "failed": "**FAILED**", "refused": "refused"}
    header = ["strategy", "link, Mbit/s", "delay, ms", "predicted share", "measured share", "off, points"]
    header += ["predicted step, s", "measured step, s"]
    return frame.page_of(
        "\n".join(["# Training across hosts\n", *summary_lines(record)]),
        frame.made_from(record, source=source, name="network"),
        frame.section(
            "The same training on several hosts",
            ["strategy", "ranks", "hosts", "started by", "loss", "gradient norm", "weights"],
            spread,
            text=frame.filled("network-hosts", record),
        ),
        frame.section("Waiting for slow links", header, points, text=on_links),
        frame.troubles([*record["trainings"], *record["over_links"]], words),
    )


def summary_lines(record: frame.Record) -> list[str]:
    """The verdict."""
    spread, off = record["trainings"], [abs(point["off"]) for point in record["points"]]
    good = f"{sum(one['status'] == 'passed' for one in spread)} of {len(spread)} trainings"
    lines = [f"{good} on several hosts compute what one host computes: losses, gradient norms"]
    lines.append(f"and last weights within {record['bound']:g}.")
    if off:
        lines += [
            f"The share of a step that waits for slow links is predicted within {statistics.median(off):.1%} of a step",
            f"in the median of {len(off)} points, and within {max(off):.1%} in all.",
        ]
    return lines


# The suite.

Result = dict[str, Any]
Link = tuple[int | None, float]
"""Megabits a second, None for no limit; milliseconds of delay."""


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(frame.SuiteOptions):
    """The command line."""

    turns: int = flag(POSITIVE, "N", "trainings of each strategy over each link (default: %(default)s)", default=3)
    only: tuple[str, ...] = frame.only_flag(
        "NAME", "strategies, and link-ddp and so on, by the beginnings of their names"
    )


class Network(frame.Suite[NetworkOptions, Result]):
    """Trains on several hosts, then over slow links.

    network: train on 2 and 4 hosts, and compare with the same ranks on one host. Then train over slow links, and
    compare the share of a step that waits for communication with the planner's. The hosts are network namespaces of
    this machine with links of their own, so it needs root, and /dev/net/tun for links that are late. Takes about 30
    minutes on 2 cores. Exit code 0: every strategy computes on several hosts what it computes on one; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py network
      .venv/bin/python src/benchmark.py network --only zero3 link-zero3
    """

    name, record_of, unit = "network", "trainings on several hosts", "training"
    flags, page, summary = NetworkOptions, staticmethod(network_page), staticmethod(summary_lines)

    def plan(self) -> int:
        chosen = frame.selected({name: name for name in (*STRATEGIES, *OVER_LINKS)}, self.options.only)
        cells = {cell.key: cell for cell in plan_cells()}
        self._spread = [name for name in chosen if name in STRATEGIES]
        self._linked = [cells[OVER_LINKS[name]] for name in chosen if name in OVER_LINKS]
        return len(self._spread) * len(HOSTS) + len(self._linked) * self.options.turns * (1 + len(links()))

    def begin(self) -> None:
        self._calibration: Calibration | None = None
        self._setups = dict[str, Setup]()
        self._runner = CellRunner(self.folder, repository=self.repository, device="cpu")
        write_random_tokens(self.folder, vocab_sizes={cell.shape.vocab_size for cell in self._linked}, count=TOKENS)

    def results(self) -> Iterator[Result]:
        try:
            with made_hosts(max(HOSTS)) as hosts:
                for strategy in self._spread:
                    alone = self._launch(strategy, hosts, count=1)
                    for count in HOSTS:
                        yield self._compared(strategy, count, alone, self._launch(strategy, hosts, count=count))
                if self._linked:
                    yield from self._over_links(hosts)
        except NoHosts as error:
            raise UserError(f"the suite network needs hosts: {error}") from error

    def _launch(self, strategy: str, hosts: Hosts, *, count: int) -> tuple[Path, str]:
        """Train with the scripts of ``launch/`` on the first hosts; the run folder, and what failed or nothing."""
        ranks, started_by = STRATEGIES[strategy]
        cell, more = Cell(strategy=strategy, ranks=ranks, accumulation=1), ("--no_inference", "--save_every", "0")
        assignment = self._runner.assignment(cell, call="", name=f"{strategy}-{count}", more=more)
        folder, each = Path(assignment.folder), ranks // count
        (folder / "hosts").write_text("".join(f"{hosts.address(number)} slots={each}\n" for number in range(count)))
        shared = {"MASTER": hosts.address(0), "NODES": str(count), "DEVICES": str(each), "HOSTFILE": f"{folder}/hosts"}
        script = "torchrun.sh" if started_by == TORCHRUN else "run_hostfile.sh"
        command = [self.repository / "launch" / script, *assignment.flags]
        with contextlib.ExitStack() as running:
            if started_by == SSH:
                shared |= running.enter_context(hosts.reached_by_ssh(folder / "ssh"))
            processes = []
            for number in range(1 if started_by == SSH else count):
                own = {"NODE_RANK": str(number)} if started_by == NO_SSH else {}
                processes.append(hosts.start(number, *command, log=folder / "log", variables=shared | own))
                running.callback(_end, processes[-1])
            codes = [process.wait(timeout=LIMIT_SEC) for process in processes]
        last = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        return folder / "run", f"exit codes {codes}: {' / '.join(last)}" if any(codes) else ""

    def _compared(self, strategy: str, count: int, alone: tuple[Path, str], spread: tuple[Path, str]) -> Result:
        (reference, message), (run, other) = alone, spread
        message = message or other
        off = {} if message else differences(run, reference)
        wrong = [f"{what} is off by {value:.1e}" for what, value in off.items() if value and not value <= BOUND]
        (ranks, started_by), status = STRATEGIES[strategy], "error" if message else "failed" if wrong else "passed"
        result: Result = {"name": f"{strategy} on {count} hosts", "strategy": strategy, "ranks": ranks, "hosts": count}
        result |= {"started_by": started_by, "status": status, "message": message or "; ".join(wrong)}
        return result | {"differences": off}

    def _over_links(self, hosts: Hosts) -> Iterator[Result]:
        """Strategies and links take turns, so that a machine that becomes slower favours none."""
        from dsgpt.planner.calibrate import calibrate  # noqa: PLC0415 - torch takes seconds
        from dsgpt.telemetry.profiles import COMMUNICATION_FILE  # noqa: PLC0415

        file, cells = self.folder / "calibration.json", {cell.key: cell for cell in self._linked}
        self.console.say("measuring this machine, for the planner")
        calibrate(file, seconds=CALIBRATION_SEC, devices=RANKS)
        self._calibration = read_calibration(file)

        def assignment(one: tuple[int, Link, str]) -> Assignment:
            turn, (mbit, delay_ms), key = one
            folder = self.folder / f"{key}-{mbit}-{delay_ms}-{turn}"
            folder.mkdir()
            recipe = cells[key].write_recipe(folder / "recipe.json", recipes=self.repository / "ds_configs")
            self._setups[cells[key].strategy] = cells[key].setup(recipe)
            flags = cells[key].flags(recipe=recipe, tokens=self.folder, folder=folder)
            words, call = [*flags, *training_words(FLAGS)], "dsgpt.benchmarks.network:train"
            arguments = {"hosts": hosts.name, "count": RANKS, "mbit": mbit, "delay_ms": delay_ms}
            return Assignment(folder=str(folder), flags=words, call=call, arguments=arguments)

        every = list(itertools.product(range(1, self.options.turns + 1), (NO_LIMIT, *links()), cells))
        for (turn, (mbit, delay_ms), key), end in self._runner.run(
            every, place=lambda _one: (RANKS, "torchrun"), assign=assignment, imports=ALL_IMPORTS
        ):
            strategy, run = cells[key].strategy, end.folder / "run"
            link = f"{mbit or 'no'} Mbit/s{f', {delay_ms} ms' if delay_ms else ''}"
            result: Result = {"name": f"{strategy}, {link}, turn {turn}", "strategy": strategy}
            result |= {"mbit": mbit, "delay_ms": delay_ms, "status": end.status, "message": end.message}
            if end.status == "done":
                profiled = read_object(run / COMMUNICATION_FILE)
                seconds = statistics.fmean(rank["step_time_sec"] for rank in profiled["ranks"])
                result |= {"status": "passed", "share": profiled["exposed_share"], "step_sec": seconds}
                result["shaped_by"] = end.ranks[0]["shaped"]
            yield result

    def line(self, result: Result, *, count: str, left: str) -> str:
        found = [f"{what} off by {value:.1e}" for what, value in result.get("differences", {}).items() if value]
        found += [f"waits {result['share']:.1%} of a step"] if "share" in result else []
        return f"{count} {result['name']}: {', '.join([result['status'], *found])}{left} {result['message']}".rstrip()

    def record(self, results: Sequence[Result]) -> frame.Record:
        linked, alone = ([one for one in results if ("mbit" in one) == over] for over in (True, False))
        shaped = {what: by for one in linked for what, by in one.get("shaped_by", {}).items()}
        first = self._linked[0].title.partition(", ")[2] if self._linked else None
        remark = FIRST_IN_LINE if os.sched_getscheduler(0) in {os.SCHED_FIFO, os.SCHED_RR} else ""
        facts = {"bound": BOUND, "work": frame.work_facts("cpu"), "turns": self.options.turns, "linked_work": first}
        facts |= {"shaped_by": ", ".join(shaped.values()) or None, "remark": remark}
        facts |= {"calibration": self._calibration and asdict(self._calibration), "trainings": alone}
        return facts | {"over_links": linked, "points": self._points([one for one in linked if "share" in one])}

    def _points(self, measured: Sequence[Result]) -> list[dict[str, Any]]:
        """Every limited link of every strategy: the planner's share and step, and what was measured."""
        by_link = grouped(((one["strategy"], (one["mbit"], one["delay_ms"])), one) for one in measured)
        free = [one for one in measured if one["mbit"] is None]
        if self._calibration is None or not free:
            return []
        machine = calibrated_machine(self._calibration, devices=RANKS)
        known = {one["strategy"]: predict_step(self._setups[one["strategy"]], machine) for one in free}
        waits, computes = [], []
        for one in free:
            step, wait = known[one["strategy"]], one["share"] * one["step_sec"]
            waits.append(wait / step.parts["communication"])
            computes.append((one["step_sec"] - wait) / (step.seconds - step.parts["communication"]))
        rates = machine.rates.scaled(compute=statistics.median(computes), communication=statistics.median(waits))
        points = []
        for (strategy, (mbit, delay_ms)), turns in by_link.items():
            if mbit is None:
                continue
            network = replace(rates, network=mbit * 1e6 / 8, network_sec=delay_ms / 1e3)
            linked = replace(machine, devices=1, rates=network)
            step, share = predict_step(self._setups[strategy], linked), frame.span([one["share"] for one in turns])
            point = {"strategy": strategy, "mbit": mbit, "delay_ms": delay_ms, "share": share}
            taken, predicted = (
                frame.span([one["step_sec"] for one in turns]),
                step.parts["communication"] / step.seconds,
            )
            point |= {"predicted_step_sec": step.seconds, "step_sec": taken, "predicted_share": predicted}
            points.append(point | {"off": predicted - share["median"]})
        return points

    def failures(self, record: frame.Record) -> list[str]:
        return [one["name"] for one in (*record["trainings"], *record["over_links"]) if one["status"] != "passed"]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a launcher and its ranks, if they still run."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# One rank of one training, and what two trainings differ in.


def train(flags: list[str], folder: Path, *, hosts: str, count: int, mbit: float | None, delay_ms: float) -> None:
    """Train as ``src/gpt2.py`` does with ``flags``, after this forked rank moved to its host.

    Args:
        flags: of ``src/gpt2.py``.
        folder: of the cell.
        hosts: their name.
        count: how many of them take equally many ranks.
        mbit: of each host's link, in megabits a second; None for no limit.
        delay_ms: of what each host sends.

    Raises:
        UserError: the product refuses the combination.
    """
    those, topology = Hosts(hosts, count), read_topology()
    shaped = [those.shape(number, mbit=mbit, delay_ms=delay_ms) for number in range(count if topology.is_main else 0)]
    be_rank_on(those, per_host=topology.world_size // count)
    train_rank(config_of(flags), folder, shaped=next(iter(shaped), {}))


def differences(run_dir: Path, other: Path) -> dict[str, float | None]:
    """The largest difference of two runs' losses, in nats per token, and of gradient norms and last weights, relative.

    That of norms is None if a run reports none.

    Raises:
        ValueError: they have other steps.
    """
    runs = [[line for line in read_steps(each / STEPS_FILE) if "loss" in line] for each in (run_dir, other)]
    pairs = list(zip(*runs, strict=True))
    norms = [(line["grad_norm"], reference["grad_norm"]) for line, reference in pairs]
    return {
        "loss": max(abs(line["loss"] - reference["loss"]) for line, reference in pairs),
        "gradient norm": None if None in norms[0] else max(abs(one / other - 1) for one, other in norms),
        "weights": weights_apart(*(store.checkpoints(each)[0] for each in (run_dir, other))),
    }
