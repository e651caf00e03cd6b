"""``python src/benchmark.py saving``: how long training waits for checkpoints, with ``--save_mode`` sync and async.

The same baseline training runs with both in turn, so that whatever else the machine does meets both. The figures are
those that a run writes into its record for every save; the last save of a run, which is sync in both, is left out.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.harness.record_page import one_line_if_none, read_record, write_page
from dsgpt.benchmarks.parity.command import work_folder
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.config.options import SAVE_MODES
from dsgpt.telemetry.console import Console

SCHEMA_VERSION = "1.0"
SAVE_EVERY, SAVES = 10, 4
"""Steps between saves, and those of a run that are counted."""
RATIO_BOUND = 0.2
"""What the median stall of async may be of sync's."""
WORK = {
    "model_size": "tiny",
    "vocab_size": 50257,
    "seq_length": 64,
    "global_batch_size": 4,
    "micro_batch_size_per_gpu": 4,
    "max_train_steps": SAVE_EVERY * SAVES + 1,
    "save_every": SAVE_EVERY,
    "keep_checkpoints": 2,
    "max_val_steps": 1,
}
EXIT_TOO_SLOW = 1


@dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """What the command line asked for."""

    rounds: int
    """Runs of each mode."""
    device: str
    output: Path
    """The record to write."""
    page: Path
    """The page to write."""
    keep: Path | None
    """Where to leave the runs; None to remove them."""


def run_saving(options: SavingOptions, *, repository: Path) -> int:
    """Measure; 0 where async keeps within ``RATIO_BOUND``.

    Raises:
        UserError: the text could not be prepared, or a training failed.
    """
    from dsgpt.benchmarks.harness.corpus import prepare_corpus  # noqa: PLC0415 - with torch

    console, started = Console(speaks=True), time.perf_counter()
    with ExitStack() as held:
        folder = work_folder(options.keep, held, prefix="dsgpt-saving-")
        corpus = prepare_corpus(repository, folder / "corpus")
        recipe = folder / "recipe.json"
        write_json_atomic(recipe, {"optimizer": {"type": "AdamW", "params": {"lr": 0.0003}}})
        data = {"train_data_path": corpus.train, "val_data_path": corpus.val, "deepspeed_config": recipe}
        runs = []
        for number, mode in _turns(options.rounds):
            values = {"run_type": "baseline", "device": options.device, "save_mode": mode, **data, **WORK}
            runs.append(_run(values, folder / f"{number}-{mode}", mode=mode, repository=repository))
            console.say(_line(runs[-1], number=number, rounds=options.rounds))
    record = _record(runs, options, seconds=time.perf_counter() - started)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.output, record)
    _write_page(options.page, record, options.output)
    for line in ["", *_table(record), "", f"record {options.output}, page {options.page}"]:
        console.say(line)
    return 0 if record["ratio"] <= RATIO_BOUND else EXIT_TOO_SLOW


def _turns(rounds: int) -> Iterator[tuple[int, str]]:
    """Every mode once a round, first now the one and now the other."""
    for number in range(rounds):
        for mode in SAVE_MODES if number % 2 == 0 else SAVE_MODES[::-1]:
            yield number + 1, mode


def _run(values: dict[str, Any], run_dir: Path, *, mode: str, repository: Path) -> dict[str, Any]:
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(repository / "src" / "gpt2.py"), *words, "--checkpoint_path", str(run_dir)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise UserError(f"a training with --save_mode {mode} failed: {done.stderr.strip()[-500:]}")
    record = json.loads((run_dir / "training_metrics.json").read_text(encoding="utf-8"))
    saves = record["saves"][:SAVES]
    return {
        "mode": mode,
        "saves": saves,
        "parameters": record["training_config"]["parameters"],
        "training_sec": record["summary"]["train_time_sec"] + sum(save["save_stall_sec"] for save in saves),
    }


def _line(run: dict[str, Any], *, number: int, rounds: int) -> str:
    stalls = ", ".join(f"{save['save_stall_sec']:.3f}" for save in run["saves"])
    return f"round {number} of {rounds}, {run['mode']}: training waited {stalls} s"


def _record(runs: list[dict[str, Any]], options: SavingOptions, *, seconds: float) -> dict[str, Any]:
    from dsgpt.runtime.device import describe_hardware  # noqa: PLC0415
    from dsgpt.telemetry.environment import git_commit, software_versions  # noqa: PLC0415

    figures = {mode: _figures([run for run in runs if run["mode"] == mode]) for mode in SAVE_MODES}
    return {
        "schema_version": SCHEMA_VERSION,
        "timestamp_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "env": software_versions(),
        "hardware": describe_hardware(options.device),
        "work": WORK,
        "parameters": runs[0]["parameters"],
        "rounds": options.rounds,
        "seconds": round(seconds, 1),
        "runs": runs,
        "figures": figures,
        "ratio": figures["async"]["save_stall_sec"]["median"] / figures["sync"]["save_stall_sec"]["median"],
        "ratio_bound": RATIO_BOUND,
    }


def _figures(runs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    saves = [save for run in runs for save in run["saves"]]
    found = {key: [save[key] for save in saves] for key in ("save_stall_sec", "save_total_sec", "bytes")}
    found["training_sec"] = [run["training_sec"] for run in runs]
    return {
        key: {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}
        for key, values in found.items()
    }


def make_page(record_file: Path, page: Path) -> None:
    """Write ``page`` from a record.

    Raises:
        UserError: there is no such record.
    """
    record = read_record(record_file, of="saves")
    with one_line_if_none(record_file, of="saves"):
        _write_page(page, record, record_file)


def _write_page(page: Path, record: dict[str, Any], record_file: Path) -> None:
    hardware, work, source = record["hardware"], record["work"], record_file.as_posix()
    machine = hardware["gpu_name"] or f"{hardware['cpu_name']}, {hardware['cpu_count']} cores"
    size = record["figures"]["sync"]["bytes"]["median"] / 1e6
    head = f"""# How long training waits for a checkpoint

Generated from `{source}` by
`python src/benchmark.py saving --table-from {source} --page docs/saving.md`;
`python src/benchmark.py saving` measures it on your machine.

The model `{work["model_size"]}` with {record["parameters"]:,} parameters, whose checkpoint has {size:,.0f} MB, is
trained {record["rounds"]} times with `--save_mode sync` and as often with `async`, in turn; {SAVES} saves of each run
count. With async, training waits **{record["ratio"]:.0%}** of the time that it waits with sync (medians; at most
{record["ratio_bound"]:.0%} are aimed at). What async does beside training takes a core's time while it lasts, which
shows in the last column where no core is free.

Machine: {machine}; {hardware["device"]}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}."""
    write_page(page, "\n".join([head, "", *_table(record), ""]))


def _table(record: dict[str, Any]) -> list[str]:
    lines = [
        "| save mode | training waits, median (range) | until published, median (range) | a run's steps and saves |",
        "|---|---|---|---|",
    ]
    for mode, figures in record["figures"].items():
        cells = [_span(figures[key]) for key in ("save_stall_sec", "save_total_sec", "training_sec")]
        lines.append(f"| {' | '.join([mode, *cells])} |")
    return lines


def _span(figures: dict[str, float]) -> str:
    return f"{figures['median']:.3f} s ({figures['smallest']:.3f} to {figures['largest']:.3f})"
