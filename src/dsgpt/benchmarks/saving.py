"""``benchmark.py saving``: how long training waits for a checkpoint.

The same baseline training runs with ``--save_mode`` sync and async in turn, so that other load on the machine affects
both. The figures are those that a run records for every save. The last save of a run does not count, because it is
sync in both modes.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.frame import Record, Suite, SuiteOptions, device_flag
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.common.text import machine_words
from dsgpt.config.options import SAVE_MODES
from dsgpt.record.schema import RECORD_FILE


def saving_page(record: Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.saving`` makes it.
        source: the record's path, for the reader.
    """
    hardware, work = record["hardware"], record["work"]
    size = record["figures"]["sync"]["bytes"]["median"] / 1e6
    head = f"""# How long training waits for a checkpoint

Generated from `{source}` by
`.venv/bin/python src/benchmark.py saving --table-from {source} --page docs/saving.md`;
`.venv/bin/python src/benchmark.py saving` measures it on your machine.

The model `{work["model_size"]}` with {record["parameters"]:,} parameters, whose checkpoint has {size:,.0f} MB, is
trained {record["rounds"]} times with `--save_mode sync` and {record["rounds"]} times with `async`, in turn;
{_counted(record)} saves of each run count. With async, training waits **{record["ratio"]:.0%}** of the time that it
waits with sync (medians; the goal is at most {record["ratio_bound"]:.0%}). An async save uses a core while training
continues. If no core is free, the last column shows that.

Machine: {machine_words(hardware)}; {hardware["device"]}. Commit `{record["git_commit"]}`, {record["timestamp_utc"]}."""
    return "\n".join([head, "", "## Figures", "", *summary_lines(record), ""])


def summary_lines(record: Record) -> list[str]:
    """The table of both modes, for a console."""
    lines = [
        "| save mode | training waits, median (range) | until published, median (range) | a run's steps and saves |",
        "|---|---|---|---|",
    ]
    for mode, figures in record["figures"].items():
        cells = [_span(figures[key]) for key in ("save_stall_sec", "save_total_sec", "training_sec")]
        lines.append(f"| {' | '.join([mode, *cells])} |")
    return lines


def _counted(record: Record) -> int:
    return max(len(run["saves"]) for run in record["runs"])


def _span(figures: dict[str, float]) -> str:
    return f"{figures['median']:.3f} s ({figures['smallest']:.3f} to {figures['largest']:.3f})"


SCHEMA_VERSION = "1.0"
SAVE_EVERY, SAVES = 10, 4
"""Steps between saves, and the number of saves of a run that count."""
RATIO_BOUND = 0.2
"""Bound on the median stall of async, divided by that of sync."""
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

Run = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavingOptions(SuiteOptions):
    """The command line."""

    rounds: int = flag(POSITIVE, "N", "runs of each save mode (default: %(default)s)", default=5)
    device: str = device_flag("cpu or cuda")


class Saving(Suite[SavingOptions, Run]):
    """Trains with both save modes in turn."""

    name, record_of, schema_version, unit = "saving", "saves", SCHEMA_VERSION, "run"
    flags, page, summary = SavingOptions, staticmethod(saving_page), staticmethod(summary_lines)
    description = """\
saving: train the model `tiny` with --save_mode sync and async in turn, and compare how long training waits for each
checkpoint. Exit code 0: async waits at most a fifth of the time; 1: longer."""
    examples = """\
examples:
  .venv/bin/python src/benchmark.py saving
  .venv/bin/python src/benchmark.py saving --rounds 10"""

    def plan(self) -> int:
        return len(list(_turns(self.options.rounds)))

    def begin(self) -> None:
        from dsgpt.benchmarks.cells import prepare_corpus  # noqa: PLC0415 - numpy takes its time

        recipe = self.folder / "recipe.json"
        corpus = prepare_corpus(self.repository, self.folder / "corpus")
        write_json_atomic(recipe, {"optimizer": {"type": "AdamW", "params": {"lr": 0.0003}}})
        data = {"train_data_path": corpus.train, "val_data_path": corpus.val, "deepspeed_config": recipe}
        self._flags = {"run_type": "baseline", "device": self.options.device, **data, **WORK}

    def results(self) -> Iterator[Run]:
        for number, mode in _turns(self.options.rounds):
            run_dir = self.folder / f"{number}-{mode}"
            measured = _run(self._flags | {"save_mode": mode}, run_dir, mode=mode, repository=self.repository)
            yield {"round": number, **measured}

    def line(self, result: Run, *, count: str, left: str) -> str:  # noqa: ARG002 - the rounds are its count
        stalls = ", ".join(f"{save['save_stall_sec']:.3f}" for save in result["saves"])
        return f"round {result['round']} of {self.options.rounds}, {result['mode']}: training waited {stalls} s"

    def record(self, results: Sequence[Run]) -> Record:
        runs = [{key: value for key, value in run.items() if key != "round"} for run in results]
        figures = {mode: _figures([run for run in runs if run["mode"] == mode]) for mode in SAVE_MODES}
        return {
            "work": WORK,
            "parameters": runs[0]["parameters"],
            "rounds": self.options.rounds,
            "runs": runs,
            "figures": figures,
            "ratio": figures["async"]["save_stall_sec"]["median"] / figures["sync"]["save_stall_sec"]["median"],
            "ratio_bound": RATIO_BOUND,
        }

    def failures(self, record: Record) -> list[str]:
        return [] if record["ratio"] <= RATIO_BOUND else ["async waits longer than the bound allows"]


def _turns(rounds: int) -> Iterator[tuple[int, str]]:
    """Both modes in every round; they take turns at being the first."""
    for number in range(rounds):
        for mode in SAVE_MODES if number % 2 == 0 else SAVE_MODES[::-1]:
            yield number + 1, mode


def _run(values: dict[str, Any], run_dir: Path, *, mode: str, repository: Path) -> Run:
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(repository / "src" / "gpt2.py"), *words, "--checkpoint_path", str(run_dir)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise UserError(f"a training with --save_mode {mode} failed: {done.stderr.strip()[-500:]}")
    record = read_object(run_dir / RECORD_FILE)
    saves = record["saves"][:SAVES]
    return {
        "mode": mode,
        "saves": saves,
        "parameters": record["training_config"]["parameters"],
        "training_sec": record["summary"]["train_time_sec"] + sum(save["save_stall_sec"] for save in saves),
    }


def _figures(runs: list[Run]) -> dict[str, dict[str, float]]:
    saves = [save for run in runs for save in run["saves"]]
    found = {key: [save[key] for save in saves] for key in ("save_stall_sec", "save_total_sec", "bytes")}
    found["training_sec"] = [run["training_sec"] for run in runs]
    return {
        key: {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}
        for key, values in found.items()
    }
