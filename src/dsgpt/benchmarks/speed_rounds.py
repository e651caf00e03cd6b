"""Interleaved rounds of the speed suite, its processes, and what is around the steps."""

import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsgpt.benchmarks.speed_work import ANSWER, HUGGING_FACE, NANOGPT, OURS, Entry, Row, Work
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.machine.launcher import launcher_command
from dsgpt.machine.topology import free_port

# The processes of a contender, seen from the command that measures them.


class Team:
    """All ranks of a contender. They wait, without using a core, until they are told to take steps.

    Raises:
        UserError: a rank ended; the message has the end of what it printed.
    """

    def __init__(self, row: Row, entry: Entry, *, tokens: Path, folder: Path, peer: Path | None) -> None:
        self._name, self._log = f"{entry.name}, {row.title}", folder / "output.txt"
        self.tokens = row.work.tokens * entry.ranks
        """Of a step of all ranks."""
        self.ranks = entry.ranks
        folder.mkdir(parents=True)
        world_size = 1 if entry.apart else entry.ranks
        port = free_port()
        self._held = contextlib.ExitStack()
        output = self._held.enter_context(self._log.open("ab"))
        self._processes = []
        for rank in range(entry.ranks):
            job = folder / f"rank-{rank}.json"
            own = folder / f"rank-{rank}"
            own.mkdir()
            write_json_atomic(
                job,
                {
                    "kind": entry.kind,
                    "keeps_memory": entry.keeps_memory,
                    "work": row.work.as_dict(),
                    "tokens": str(tokens),
                    "folder": str(own),
                    "peer": str(peer) if peer else None,
                },
            )
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dsgpt.benchmarks.speed_work", str(job)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    env=_environment(
                        0 if entry.apart else rank,
                        world_size,
                        port=free_port() if entry.apart else port,
                        threads=row.work.threads,
                    ),
                )
            )

    def ready(self) -> None:
        """Wait until every rank has built its model."""
        self._answers()

    def take(self, steps: int) -> dict[str, Any]:
        """Let every rank take ``steps`` steps; returns the answer of the slowest."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = self._answers()
        return max(answers, key=lambda answer: float(answer["seconds"]))

    def _answers(self) -> list[dict[str, Any]]:
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return answer
        raise UserError(f"{self._name}: ended: {self._log.read_text(encoding='utf-8', errors='replace')[-1500:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._held.close()


def _environment(rank: int, ranks: int, *, port: int, threads: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_", "MKL_"))}
    kept |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    kept |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return kept | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


# Interleaved rounds: every contender of a row takes a few steps in turn, again and again.

WARM_UP_STEPS = 3
SETTLING_STEPS = 1
"""Before every turn, not counted: while a process waits, caches and even its pages may go to others."""
SHORTEST_TURN_SEC = 1.5
"""A turn has as many steps as take this long, so that starting and ending it does not count."""


def measure_row(row: Row, *, rounds: int, tokens: Path, folder: Path, peers: dict[str, Path]) -> dict[str, Any]:
    """The row's result: tokens per second of every contender in every round, and the ratio of the first to the best.

    In each round another contender is the first, so that a machine that becomes slower favours none.

    Raises:
        UserError: a contender failed.
    """
    with contextlib.ExitStack() as held:
        teams = {
            entry.name: held.enter_context(
                Team(row, entry, tokens=tokens, folder=folder / str(number), peer=peers.get(entry.kind))
            )
            for number, entry in enumerate(row.entries)
        }
        steps = {name: _warm_up(team) for name, team in teams.items()}
        names = list(teams)
        speeds: dict[str, list[float]] = {name: [] for name in names}
        last: dict[str, dict[str, Any]] = {}
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                teams[name].take(SETTLING_STEPS)
                last[name] = teams[name].take(steps[name])
                speeds[name].append(teams[name].tokens * steps[name] / last[name]["seconds"])
    per_rank = {name: [speed / teams[name].ranks for speed in values] for name, values in speeds.items()}
    return {
        "key": row.key,
        "title": row.title,
        "work": row.work.as_dict(),
        "entries": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "ranks": entry.ranks,
                "steps_per_turn": steps[entry.name],
                "tokens_per_sec": span(speeds[entry.name]),
                "loss": last[entry.name]["loss"],
                "peak_bytes": last[entry.name]["peak_bytes"],
                "synchronisations": last[entry.name]["synchronisations"],
            }
            for entry in row.entries
        ],
        "flops_per_token": row.work.shape.flops_per_token(),
        **_ratio(per_rank if row.per_rank else speeds, row),
    }


def _warm_up(team: Team) -> int:
    """Warm the contender up; returns the number of steps of its turns."""
    team.ready()
    team.take(WARM_UP_STEPS)
    seconds: float = team.take(2)["seconds"] / 2
    return max(1, math.ceil(SHORTEST_TURN_SEC / seconds))


def _ratio(speeds: dict[str, list[float]], row: Row) -> dict[str, Any]:
    """The first entry's speed divided by that of the fastest other, round by round; and the limit of weak scaling."""
    first, *others = row.entries
    found: dict[str, Any] = {"target": row.target}
    for best_key, ratio_key, keeps_memory in (
        ("best_other", "ratio", False),
        ("best_with_memory_kept", "ratio_with_memory_kept", True),
    ):
        names = [entry.name for entry in others if entry.keeps_memory == keeps_memory and not entry.apart]
        if names:
            best = max(names, key=lambda name: statistics.median(speeds[name]))
            ratios = [ours / theirs for ours, theirs in zip(speeds[first.name], speeds[best], strict=True)]
            found |= {best_key: best, ratio_key: span(ratios)}
    for entry in others:
        if entry.apart:
            best = found["best_other"]
            limits = [apart / alone for apart, alone in zip(speeds[entry.name], speeds[best], strict=True)]
            found["limit"] = span(limits)
    return found


def span(values: list[float]) -> dict[str, Any]:
    """Median, smallest and largest of ``values``, and all of them."""
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values), "values": values}


def measure_memory(work: Work, *, steps: int, tokens: Path, folder: Path, peers: dict[str, Path]) -> dict[str, Any]:
    """The most memory of a process that takes ``steps`` steps, for this program and nanoGPT, and their ratio.

    On a CPU it is all that was resident in the host, with Python and its libraries; on a GPU what torch had allocated.

    Raises:
        UserError: a contender failed.
    """
    title = f"peak memory, {work.shape.name}, T={work.shape.length}, B={work.batch}, {work.precision}"
    kinds = [OURS, *(kind for kind in (NANOGPT, HUGGING_FACE) if kind == HUGGING_FACE or kind in peers)]
    entries = tuple(Entry(name=kind, kind=kind) for kind in kinds)
    row = Row(key="memory", title=title, work=work, entries=entries, target=0)
    peaks = {}
    for entry in entries:
        own = folder / entry.name.replace(" ", "-")
        with Team(row, entry, tokens=tokens, folder=own, peer=peers.get(entry.kind)) as team:
            team.ready()
            peaks[entry.name] = team.take(steps)["peak_bytes"]
    best = min((name for name in peaks if name != OURS), key=lambda name: peaks[name])
    other = NANOGPT if NANOGPT in peaks else best
    return {
        "title": title,
        "work": work.as_dict(),
        "peak_bytes": peaks,
        "other": other,
        "share": peaks[OURS] / peaks[other],
    }


HELP_TARGET_SEC, AROUND_TARGET = 0.3, 0.01
# What is around the steps: how long a start takes, and what share of a run is not its steps.

FIRST_STEP_TARGET_SEC = {"baseline": 6.0, "zero1": 12.0}
OVERHEAD_STEPS = 12
DEMO = (
    *("--model_size", "demo", "--seq_length", "128", "--max_val_steps", "1", "--steps_per_print", "1"),
    *("--deepspeed_config", "ds_configs/sizes/demo.json", "--save_every", "0"),
)
"""The training of ``make demo``; the data follow."""


def measure_help(repository: Path, *, rounds: int) -> dict[str, Any]:
    """Seconds of ``src/gpt2.py --help``."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        subprocess.run([sys.executable, "src/gpt2.py", "--help"], cwd=repository, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    return {"seconds": span(seconds), "target": HELP_TARGET_SEC}


def measure_first_step(
    repository: Path, folder: Path, *, kind: str, device: str, data: Path, rounds: int
) -> dict[str, Any]:
    """Seconds from the launch of the demo's training to the end of its first step; one run before is not counted.

    Raises:
        UserError: a run failed.
    """
    seconds = []
    for number in range(rounds + 1):
        words = [*_demo_words(data, device), "--max_train_steps", "1", "--checkpoint_path", str(folder / str(number))]
        seconds.append(_until_first_step(_command(kind, words), repository))
    return {"seconds": span(seconds[1:]), "target": FIRST_STEP_TARGET_SEC[kind]}


def _command(kind: str, words: list[str]) -> list[str]:
    if kind == "baseline":
        return [sys.executable, "src/gpt2.py", "--run_type", "baseline", *words]
    return [*launcher_command("deepspeed", 1), "src/gpt2.py", "--run_type", "optimized", *words]


def _demo_words(data: Path, device: str) -> list[str]:
    threads = ["--threads_per_device", str(os.cpu_count() or 1)] if device == "cpu" else []
    files = ["--train_data_path", str(data / "train.bin"), "--val_data_path", str(data / "val.bin")]
    return [*DEMO, *files, "--device", device, *threads]


def _until_first_step(command: list[str], repository: Path) -> float:
    started, lines = time.perf_counter(), []
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"} if "cpu" in command else dict(os.environ)
    with subprocess.Popen(
        command, cwd=repository, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        found = None
        for line in process.stdout:
            lines.append(line)
            if found is None and re.search(r"step +1/1  loss", line):
                found = time.perf_counter() - started
    if process.returncode or found is None:
        raise UserError(f"{' '.join(command[:3])}: no first step: {''.join(lines)[-1500:]}")
    return found


def measure_around(repository: Path, folder: Path, *, device: str, data: Path) -> dict[str, Any]:
    """The share of a demo run that is not forward, backward and optimizer: data, metering, logging, journal.

    From the run's own lines: the time from one step's end to the next, without the step but with its wait for data.

    Raises:
        UserError: the run failed.
    """
    length = ["--max_train_steps", str(OVERHEAD_STEPS), "--steps_per_print", "10"]
    words = [*_demo_words(data, device), *length, "--checkpoint_path", str(folder)]
    done = subprocess.run(_command("baseline", words), cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"the demo's training failed: {done.stderr[-1500:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line and "step_time_sec" in line and not line["warm_up"]]
    shares = []
    for before, after in pairwise(steps):
        between = after["wall_time_sec"] - before["wall_time_sec"]
        computing = after["step_time_sec"] - after["dataload_time_sec"]
        shares.append((between - computing) / between)
    return {"share": span(shares), "target": AROUND_TARGET, "step_sec": span([line["step_time_sec"] for line in steps])}
