"""What is around the steps: how long a start takes, and what share of a run is not its steps."""

import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.speed.measure import span
from dsgpt.common.errors import UserError
from dsgpt.runtime.launcher import launcher_command

HELP_TARGET_SEC, AROUND_TARGET = 0.3, 0.01
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
