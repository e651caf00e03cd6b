"""Records, sweeps and committed records for tests of what reads them."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from small_run import RECIPE, command_line, write_data

from dsgpt.config.options import parse_arguments
from dsgpt.config.recipe import read_recipe
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.device import HostGroup
from dsgpt.machine.topology import read_topology
from dsgpt.record.runs import Footprint, Run, read_run
from dsgpt.record.suites import Compared, Comparison, Spread, State, Sweep, SweepCell, Turn
from dsgpt.telemetry.meter import StepResult
from dsgpt.training.journal import Journal, open_sinks
from dsgpt.training.run_description import data_hashes, describe_run, initial_weights_hash
from dsgpt.training.run_folder import ResumePoint

# Records for the tests, made up and written where a test asks: no measurement of anything.


def record(**changes: Any) -> dict[str, Any]:
    """A complete record of generation 2.1; ``changes`` are ``section__key=value``, or ``key=value`` at the top."""
    values: dict[str, Any] = {
        "schema_version": "2.1", "status": "completed", "resumed_from": None, "host": "fixture-host",
        "hardware": {"device": "cpu", "gpu_name": None, "world_size": 1, "cpu_name": "Fixture CPU", "cpu_count": 2,
                     "threads_per_device": 1},
        "data": {"train_path": "t.bin", "train_sha256": "a" * 64, "val_path": "v.bin", "val_sha256": "b" * 64},
        "training_config": {
            "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 32, "vocab_size": 256, "dropout": 0.0},
            "seq_len": 32, "global_batch_size": 8, "lr": 0.001, "optimizer": "AdamW",
            "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4}}, "gradient_clipping": 1.0,
            "precision": "fp32", "strategy": "baseline", "seed": 7, "run_type": "baseline", "val_windows": 16,
            "loss_scaling": {"type": "none"},
            "optimizer_params": {"type": "AdamW", "lr": 0.001, "betas": [0.9, 0.95], "momentum": None,
                                 "torch_adam": False}},
        "epochs": [
            {"epoch_idx": place, "optimizer_steps": 20, "tokens_processed_global": 5120,
             "train_loss_avg_global": train, "val_loss_avg_global": val}
            for place, (train, val) in enumerate(((4.5, 4.0), (3.5, 3.25)))
        ],
        "summary": {
            "train_time_sec": 100.0, "optimizer_steps": 40, "tokens_processed_global": 10240, "final_train_loss": 3.5,
            "final_val_loss": 3.25, "best_val_loss": 3.25, "mean_tokens_per_sec_global": 102.4,
            "peak_rss_bytes_rank0": 2**30},
        "inference": {"prompt_tokens": 16, "new_tokens": 16, "latency_sec": 0.5, "tokens_per_sec": 32.0},
        **flat_record(train_time_per_epoch=[50.0, 50.0], train_throughput=102.4, inference_latency=None,
                      inference_throughput=32.0),
    }  # fmt: skip
    for path, value in changes.items():
        target, key = _place(values, path)
        target[key] = value
    return values


def _place(values: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The object that ``section__key`` is in, and the key."""
    *sections, key = path.split("__")
    return functools.reduce(dict.__getitem__, sections, values), key


def flat_record(**changes: Any) -> dict[str, Any]:
    """A record of the older generation: the flat keys alone."""
    return {
        "train_time_per_epoch": [60.0, 40.0], "train_loss_per_epoch": [4.5, 3.5], "val_loss_per_epoch": [4.0, 3.25],
        "train_throughput": 1000.0, "inference_latency": 2.0, "inference_throughput": 50.0,
    } | changes  # fmt: skip


def without(values: dict[str, Any], path: str) -> dict[str, Any]:
    """The record less one key, ``section__key``."""
    target, key = _place(values, path)
    del target[key]
    return values


def step_lines(*, steps: int = 40, every: int = 10, seconds: float = 2.5, shift: float = 0.0) -> list[dict[str, Any]]:
    """metrics.jsonl of a made-up run: a loss per step, a validation loss every ``every`` steps."""
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = 3.0 + 2.5 * math.exp(-4 * step / steps) + 0.3 * (step * 2654435761 % 2**32 / 2**32 - 0.5) + shift
        lines.append({"step": step, "epoch": 0, "loss": loss, "train_time_sec": seconds * step, "tokens": 256 * step})
        if step % every == 0:
            val = 3.1 + 2.4 * math.exp(-4 * step / steps) + shift
            lines.append({"step": step, "val_loss": val, "train_time_sec": seconds * step})
    return lines


def write_run(
    folder: Path, values: Any, *, lines: Sequence[dict[str, Any]] | None = None, name: str = "training_metrics.json"
) -> Path:
    """Write a run folder; returns the path of its record, which is called ``name``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(values))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


# Records of sweeps for the tests, with made-up figures: no measurement of anything.


MB = 10**6
STATE = {"weights": 8.0 * MB, "gradients": 8.0 * MB, "optimizer": 16.0 * MB}
FOOTPRINT = Footprint(
    model_state=STATE,
    state_rank0=32.0 * MB,
    predicted={**STATE, "activations": 10.0 * MB, "other": 2.0 * MB},
    peak=400.0 * MB,
    peak_kind="resident",
    step_times_sec=[0.1 + 0.001 * step for step in range(21)],
)


def spread(value: float) -> Spread:
    return Spread(median=value, smallest=0.9 * value, largest=1.1 * value, values=[0.9 * value, value, 1.1 * value])


def cell(name: str, devices: int, *, state: State = State.DONE, footprint: Footprint | None = FOOTPRINT) -> SweepCell:
    """A cell with one turn."""
    done = state == State.DONE
    message = None if done else "CUDA out of memory"
    turn = Turn(cell=name, repeat=1, place=1, state=state, message=message, seconds=5.0,
                footprint=footprint if done else None)  # fmt: skip
    speed = spread(1000.0 * devices) if done else None
    return SweepCell(
        name=name, devices=devices, launcher="torchrun", flags=[], turns=[turn], tokens_per_sec=speed,
        sent_bytes_per_step=8e6 if done else None, communication_share=spread(0.25) if done else None,
    )  # fmt: skip


def compared(name: str, speed_up: float | None, devices: int, *, same_work: str = "same work: yes") -> Compared:
    """A cell beside a baseline on one device."""
    if speed_up is None:
        return Compared(cell=name, same_work=same_work, comparable=False)
    efficiency = speed_up / devices
    return Compared(cell=name, same_work=same_work, comparable=True, speed_up=spread(speed_up), efficiency=efficiency)


def sweep(cells: Sequence[SweepCell], comparisons: Sequence[Comparison], **changes: Any) -> Sweep:
    values: dict[str, Any] = {
        "schema_version": "1.0", "timestamp_utc": "2026-03-04T05:06:07+00:00", "git_commit": None, "env": {},
        "hardware": {"device": "cpu", "cpu_name": "Fixture CPU", "cpu_count": 2}, "suite": "scaling", "seed": 1,
        "repeats": 3, "limit_sec": 900, "target_loss": None, "price_per_device_hour": None, "seconds": 60.0,
    }  # fmt: skip
    return Sweep(**values | changes, cells=list(cells), comparisons=list(comparisons))


def scaling(speeds: Mapping[str, Mapping[int, float]], *, weak: bool = False) -> Sweep:
    """A sweep of a baseline and of strategies with these speed-ups by number of devices."""
    base = cell("baseline on 1 device", 1)
    cells, others = [base], []
    for name, by_devices in speeds.items():
        for devices, value in by_devices.items():
            words = f"{name} on {devices} device{'s' * (devices > 1)}" + (f", batch {32 * devices}" if weak else "")
            cells.append(cell(words, devices))
            others.append(compared(words, value, devices))
    kind = ("weak scaling", "weak scaling") if weak else ("strong scaling", "same training")
    return sweep(cells, [Comparison(name=kind[0], kind=kind[1], baseline=base.name, cells=others)])


def write_sweep(folder: Path, record: Sweep) -> Path:
    return write_run(folder, asdict(record), name="sweep.json")


# Records that the program writes of runs that were resolved here and not trained.


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user asks for, in addition to the defaults of ``small_run``."""

    flags: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    """By place in the JSON, ``zero_optimization.stage``."""
    ranks: int = 1
    elsewhere: bool = False
    """The recipe is for another machine: it is read and put into the run, but not checked against this machine."""
    adapt: Callable[[RunConfig], RunConfig] = lambda config: config
    """Changes the resolved run, for settings that this machine refuses."""
    changes: Sequence[dict[str, Any]] = ()
    """At resumes."""


def resolved(folder: Path, asked: Asked) -> RunConfig:
    """The run that the program resolves from ``asked``."""
    given = json.loads(json.dumps(RECIPE))
    for place, value in asked.recipe.items():
        *blocks, key = place.split(".")
        functools.reduce(lambda block, name: block.setdefault(name, {}), blocks, given)[key] = value
    path = write_data(folder) / "recipe.json"
    path.write_text(json.dumps(given))
    flags = {"precision": "fp32", "deepspeed_config": path} | asked.flags
    options, problems = parse_arguments(command_line(folder, **flags))
    recipe = read_recipe(path, problems)
    if asked.elsewhere:
        path.write_text(json.dumps(RECIPE))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(asked.ranks), "LOCAL_WORLD_SIZE": str(asked.ranks)}
    config = resolve(options, topology=read_topology(ranks if asked.ranks > 1 else {}), problems=problems)
    problems.raise_if_any()
    return asked.adapt(replace(config, recipe=recipe) if asked.elsewhere else config)


def run_of(folder: Path, asked: Asked, *, name: str = "run", change: Callable[[dict], Any] = lambda _: None) -> Run:
    """The run as the charts read it from the record that ``describe_run`` and ``Journal`` write when it has ended.

    ``change`` edits the record before it is read, in place.
    """
    config = resolved(folder, asked)
    hashes = data_hashes(config) | {"initial weights": initial_weights_hash(config)}
    description = describe_run(config, ResumePoint(changes=tuple(asked.changes)), hashes=hashes)
    config.run_dir.mkdir(parents=True)
    sinks = open_sinks(config, done=0)
    journal = Journal(config, device=torch.device("cpu"), description=description, sinks=sinks, ranks=HostGroup())
    one = torch.tensor(1.0)
    result = StepResult(loss=one, own_loss=one, grad_norm=one, lr=0.1, skipped=torch.tensor(False))
    for step in range(1, config.total_steps + 1):
        journal.meter.start()
        journal.step_done(step=step, epoch=0, result=result, dataload_sec=0.0, watched=False)
    journal.flush()
    journal.write("completed")
    journal.close()
    record = json.loads((config.run_dir / "training_metrics.json").read_text())
    change(record)
    return read_run(write_run(config.run_dir, record), name=name)
