"""Runs that are monitored, profiled, measured, and limited."""

import gzip
import json
import os
import re
import shlex
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forked_ranks import run_script
from planner_records import RECORD
from small_run import REPOSITORY, command_line, write_recipe
from stand_in_nvml import StandInNvml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from training_runs import LONG, after_step, errors, finished, read_lines, read_record, train, write_optimizer_recipe

from dsgpt.common.errors import EXIT_NON_FINITE, EXIT_OUT_OF_MEMORY, EXIT_STOPPED, EXIT_USER_ERROR
from dsgpt.dashboard.reading import recorded_of
from dsgpt.machine.device import describe_hardware
from dsgpt.machine.peers import Peers
from dsgpt.planner.options import CALIBRATION
from dsgpt.record.schema import RECORD_FILE
from dsgpt.strategies.pytorch import Baseline
from dsgpt.telemetry.monitor import Monitor, open_gpus
from dsgpt.training import trainer
from dsgpt.training.budget import Budget
from dsgpt.training.command import train as train_here

# Runs whose GPUs are sampled, with a stand-in for the GPUs and their driver.


@pytest.fixture
def nvml(monkeypatch):
    """One GPU, which the run is said to train on."""
    module = StandInNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)

    def open_monitor(config, device):
        assert config.options.monitor_every == 0.2
        return Monitor(open_gpus(["GPU-0"]), path=config.run_dir / "hardware.jsonl", every=0.2)

    monkeypatch.setattr(trainer, "open_monitor", open_monitor)
    return module


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "hardware.jsonl").read_text().splitlines()]


def test_the_record_has_energy_per_token(finished_run, tmp_path, nvml):
    folder = tmp_path / "run"
    flags = LONG | {"monitor_every": 0.2, "checkpoint_path": folder}
    assert train_here(command_line(finished_run, **flags | {"max_train_steps": 7})) == 0
    first, use = lines(folder), read_record(folder)["summary"]["gpu_use"]
    assert use["gpus"][0]["samples"] == len(first) == nvml.samples >= 1
    assert use["joules_per_token"] == use["energy_joules"] / read_record(folder)["summary"]["tokens_processed_global"]
    assert nvml.open == 0
    assert train_here(command_line(finished_run, **flags, resume=True, allow_changed="recipe")) == 0
    later, use = lines(folder)[len(first) :], read_record(folder)["summary"]["gpu_use"]
    assert use["gpus"][0]["samples"] == len(later) >= 1
    assert use["joules_per_token"] == pytest.approx(use["energy_joules"] / (5 * 8 * 16))
    assert train_here(command_line(finished_run, **flags, overwrite=True)) == 0
    assert len(lines(folder)) == read_record(folder)["summary"]["gpu_use"]["gpus"][0]["samples"]


def test_an_interrupt_ends_the_monitor_and_keeps_the_steps(finished_run, tmp_path, nvml, monkeypatch):
    after_step(monkeypatch, 3, Mock(side_effect=KeyboardInterrupt))
    flags = LONG | {"save_every": 0, "eval_every": 0, "monitor_every": 0.2, "checkpoint_path": tmp_path / "run"}
    assert train_here(command_line(finished_run, **flags)) == 130
    assert "GPU monitor" not in {thread.name for thread in threading.enumerate()}
    assert (nvml.open, len(lines(tmp_path / "run"))) == (0, nvml.samples)
    assert [line["step"] for line in read_lines(tmp_path / "run")] == [1, 2, 3]
    found = read_record(tmp_path / "run")
    assert (found["status"], found["summary"]["optimizer_steps"]) == ("interrupted", 3)


def test_ranks_that_stop_together_leave_together(finished_run, tmp_path, monkeypatch):
    """Then none waits for one that left, and the launcher ends none that still writes."""
    calls: list[str] = []
    end = Peers.end
    monkeypatch.setattr(Peers, "end", lambda peers: [calls.append("end"), end(peers)])
    monkeypatch.setattr(trainer, "barrier", lambda: calls.append("barrier"))
    after_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run", **LONG)) == EXIT_STOPPED
    assert calls == ["end", "barrier"]


# Runs whose steps are profiled: communication is measured, every rank writes a trace, and the training is the same.


RANGES = {"data", "train_step", "forward", "backward", "optimizer"}
STEPS = ("--max_train_steps", "10", "--steps_per_print", "3", "--max_val_steps", "1", "--no_inference")


def named_ranges(run: Path, rank: int) -> dict[str, list[dict[str, Any]]]:
    """The ranges of the program in a trace, by name; the file is JSON in gzip."""
    with gzip.open(run / "profile" / f"rank{rank}.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in RANGES]
    return {name: [event for event in found if event["name"] == name] for name in RANGES}


def inside(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a range lies in another; times are in microseconds."""
    return other["ts"] <= one["ts"] and one["ts"] + one["dur"] <= other["ts"] + other["dur"]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A run of ZeRO-1 on two ranks, profiled, and the same run without."""
    folder = tmp_path_factory.mktemp("profiled")
    recipe = write_optimizer_recipe(folder / "recipe.json")
    flags = (*STEPS, "--grad_accum_steps", "2")
    plain, profiled = folder / "plain", folder / "profiled"
    finished(train(plain, corpus, recipe, *flags, ranks=2))
    finished(train(profiled, corpus, recipe, *flags, "--profile_comm", "2", "--profile", "2", ranks=2))
    return plain, profiled


def test_profiling_does_not_change_the_training_and_is_left_out_of_speed(runs):
    """Three steps of warm-up, two for communication, two of the profiler's own warm-up and two traced."""
    plain, profiled = map(read_lines, runs)
    losses = [[(line["loss"], line["grad_norm"]) for line in lines] for lines in (plain, profiled)]
    assert losses[0] == losses[1]
    assert [line["step"] for line in plain if not line["warm_up"]] == [4, 5, 6, 7, 8, 9, 10]
    assert [line["step"] for line in profiled if not line["warm_up"]] == [10]


def test_what_communication_costs_and_the_traces(runs):
    plain, profiled = runs
    assert not (plain / "communication.json").exists()
    assert read_record(plain)["summary"]["communication_share"] is None
    measured = json.loads((profiled / "communication.json").read_text(encoding="utf-8"))
    assert (measured["first_step"], measured["steps"], measured["backend"]) == (4, 2, "gloo")
    assert read_record(profiled)["summary"]["communication_share"] == measured["exposed_share"]
    cost = read_record(profiled)["cost"]["communication_per_step"]
    calls = {row["op"]: row["calls"] for row in cost["by_op"]}
    for rank, figures in enumerate(measured["ranks"]):
        assert figures["rank"] == rank
        assert {row["op"]: row["calls"] for row in figures["by_op"]} == calls
        assert sum(row["ring_bytes"] for row in figures["by_op"]) == cost["ring_bytes_by_rank"][rank]
        for row in figures["by_op"]:
            assert row["bus_bytes_per_sec"] == pytest.approx(row["ring_bytes"] / row["time_sec"])
        assert 0 < figures["communication_sec"] < figures["step_time_sec"]
        assert figures["communication_sec"] <= sum(row["time_sec"] for row in figures["by_op"]) + 1e-9
        assert figures["exposed_sec"] + figures["hidden_sec"] == pytest.approx(figures["communication_sec"])
    log = (profiled / "train.log").read_text(encoding="utf-8")
    assert "communication of steps 4 to 5: exposed" in log
    assert "profile of steps 8 to 9 on rank 0" in log
    for rank in range(2):
        found = named_ranges(profiled, rank)
        steps = found.pop("train_step")
        assert {name: len(ranges) for name, ranges in found.items()} == dict.fromkeys(RANGES - {"train_step"}, 4)
        assert len(steps) == 2
        assert all(any(inside(one, step) for step in steps) for ranges in found.values() for one in ranges)


def test_a_baseline_waits_for_nobody_and_a_run_too_short_for_a_trace_says_so(finished_run, tmp_path):
    run = tmp_path / "run"
    flags = {"checkpoint_path": run, "max_train_steps": 4, "profile_comm": 1, "profile": 2}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert read_record(run)["summary"]["communication_share"] == 0
    assert "--profile: the run ended before" in (run / "train.log").read_text()
    flags |= {"max_train_steps": 5, "profile_comm": 0, "overwrite": True}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert "--profile: too few steps were left" in (run / "train.log").read_text()
    assert not (run / "communication.json").exists()


# The share of this machine's measured peak that a run on a CPU reaches.


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_beside_a_calibration_has_its_share(finished_run, tmp_path, monkeypatch, capsys, damaged):
    monkeypatch.chdir(tmp_path)
    here = RECORD | {"hardware": describe_hardware("cpu")}
    CALIBRATION.parent.mkdir()
    CALIBRATION.write_text(json.dumps(here)[: -5 if damaged else None])
    flags = LONG | {"checkpoint_path": tmp_path / "run", "threads_per_device": 1, "device": "cpu"}
    assert train_here(command_line(finished_run, **flags | {"max_train_steps": 6})) == 0
    summary = read_record(tmp_path / "run")["summary"]
    shares = [line["interval"]["mfu"] for line in read_lines(tmp_path / "run") if "interval" in line]
    if damaged:
        assert summary["mfu"] is None and not any(shares)
        assert f"MFU is unknown: {CALIBRATION} cannot be used" in capsys.readouterr().out
    else:
        expected = summary["mean_tokens_per_sec_per_device"] * summary["flops_per_token"] / 4e11
        assert summary["mfu"] == pytest.approx(expected)
        assert shares[0] is None and all(shares[1:])  # the first interval is the warm-up


# Limits of time and money, the plan beside the run, `--on_event`, and memory that runs out.


SABOTAGE = """
import os, sys, time
import torch
from dsgpt.training.command import train
from dsgpt.machine.launcher import exit_rank
from dsgpt.training import budget as events
from dsgpt.training.budget import Budget
from dsgpt.training.trainer import Trainer
{}
exit_rank(train(sys.argv[1:]))
"""
"""A stand-in for ``src/gpt2.py``, into which a test puts what cannot happen here, or only after hours."""
LIMIT_ON_THE_LAST_RANK = """
calls = []
def reached(self):
    calls.append(1)
    return "--max_hours 3" if int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1 \
        and len(calls) > 3 else None
Budget.reached = reached
"""
NO_MEMORY = """
os.environ["TORCHELASTIC_ERROR_FILE"] = "error.json"  # as torchrun names one; its summary ends with what is in it
def fails(*args, **named):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total of 14.56 GiB")
torch.optim.AdamW.step = fails
"""
STALL = """
events.STALLED_SEC = events.STALLED_TIMES = events.POLL_SEC = 0.01
take = Trainer._after_step
def slow(self, step):
    time.sleep(0.5 if step == 3 else 0)
    return take(self, step)
Trainer._after_step = slow
"""
SIGNAL = """
import signal
take = Trainer._after_step
def signalled(self, step):
    if step == 8:
        signal.raise_signal(signal.SIGTERM)
    return take(self, step)
Trainer._after_step = signalled
"""
NOTE = "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')"


@pytest.fixture
def sabotaged(here):
    """Trains 12 steps with a sabotage and ``--on_event``; returns what it printed, its code and the events."""

    def run(sabotage: str, ranks: int | None = None, **flags):
        script, heard = here / "sabotage.py", here / "heard"
        script.write_text(SABOTAGE.format(sabotage))
        event = f"{sys.executable} -c \"{NOTE}\" '{heard}'"
        flags = {"max_train_steps": 12, "no_inference": True, "on_event": event} | flags
        run_type = "baseline" if ranks is None else "ddp"
        done = run_script(script, command_line(here, run_type=run_type, **flags), ranks=ranks, cwd=here)
        lines = [line.split(" ", 1) for line in heard.read_text().splitlines()] if heard.exists() else []
        assert {path for _, path in lines} <= {str(flags.get("checkpoint_path", here / "run") / RECORD_FILE)}
        return done, [event for event, _ in lines]

    return run


def test_every_rank_stops_at_the_limit_that_one_of_them_sees(sabotaged, tmp_path):
    done, events = sabotaged(LIMIT_ON_THE_LAST_RANK, 2)
    assert done.returncode == EXIT_STOPPED, done.stderr
    steps = read_record(tmp_path / "run")["summary"]["optimizer_steps"]
    assert f"stopped by --max_hours 3 after step {steps}, which is saved" in done.stdout
    assert (tmp_path / "run" / f"step-{steps:08}").is_dir()
    assert events == ["limit"]
    done, events = sabotaged(SIGNAL, 2, resume=True)
    assert (done.returncode, events[1:]) == (EXIT_STOPPED, ["preempted"]), done.stderr
    done, events = sabotaged("", 2, resume=True)
    assert (done.returncode, events[2:]) == (0, ["done"])


def test_no_limit_stops_a_run_whose_steps_are_all_done(finished_run, tmp_path, monkeypatch):
    complete = trainer.Trainer._complete

    def limited(self: trainer.Trainer) -> None:
        monkeypatch.setattr(Budget, "reached", lambda _: "--max_hours 3")
        complete(self)

    monkeypatch.setattr(trainer.Trainer, "_complete", limited)
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0
    assert read_record(tmp_path / "run")["status"] == "completed"


def test_a_signal_ends_the_measurement_of_inference_at_once(finished_run, tmp_path, monkeypatch):
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(trainer, "measure_latency", lambda *_: stop() or {"prefill_sec": 1.0})
    train_here(command_line(finished_run, checkpoint_path=tmp_path / "run", no_inference=None))
    assert read_record(tmp_path / "run")["inference"] is None


def test_money_counts_over_all_processes_of_a_run(sabotaged, tmp_path):
    _, events = sabotaged(LIMIT_ON_THE_LAST_RANK, price_per_gpu_hour=3600)  # a dollar a second
    first = read_record(tmp_path / "run")["plan"]["spent_usd"]
    assert first > 0
    done, events = sabotaged("", resume=True, price_per_gpu_hour=3600, max_cost=first)
    assert done.returncode == EXIT_USER_ERROR
    assert f"--max_cost {first:g} leaves no time for a step and its save: raise it" in done.stderr
    done, events = sabotaged("", resume=True, price_per_gpu_hour=3600, max_cost=first + 10_000)
    assert (done.returncode, events[-1]) == (0, "done")
    assert read_record(tmp_path / "run")["plan"]["spent_usd"] > first


def test_the_command_hears_of_stalls_and_of_nan_and_may_fail(sabotaged, tmp_path):
    done, events = sabotaged(STALL)
    assert done.returncode == 0, done.stderr
    assert (set(events), events[-1]) == ({"stalled", "done"}, "done")
    recipe = write_recipe(tmp_path / "nan.json", optimizer={"type": "SGD", "params": {"lr": 1e30}})
    done, events = sabotaged("", overwrite=True, deepspeed_config=recipe)
    assert (done.returncode, events[-1]) == (EXIT_NON_FINITE, "nan")
    done, _ = sabotaged("", overwrite=True, on_event="false")
    assert done.returncode == 0
    assert len([line for line in (done.stdout + done.stderr).splitlines() if "--on_event done: " in line]) == 1


def test_memory_that_runs_out_is_one_line(sabotaged, tmp_path):
    """No GPU is needed: the optimizer raises what PyTorch raises on one."""
    done, events = sabotaged(NO_MEMORY, 2)
    assert (done.returncode, events) == (EXIT_OUT_OF_MEMORY, ["failed"])
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: rank 0 ")]
    assert "out of memory in the optimizer step: tried to allocate 2.50 GiB, " in line
    assert "were predicted for a step; this fits by the formulas: --micro_batch_size_per_gpu " in line
    assert "Traceback" not in done.stderr
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=EXIT_OUT_OF_MEMORY, error_file=str(tmp_path / "error.json"))
    shown = ChildFailedError("gpt2.py", {0: failure}).format_msg()
    assert shown.splitlines()[-2] == f"  traceback : {line.removeprefix('error: ')}"


ERRORS = {
    "CUDA": torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "NCCL": torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:76, unhandled cuda error\nLast error:\nFailed to CUDA calloc 67108864 bytes"
    ),
}
"""With the messages that a GPU gives."""


@pytest.mark.parametrize("library", ERRORS)
def test_memory_that_runs_out_outside_of_torchs_allocator_is_one_line_too(
    finished_run, tmp_path, monkeypatch, capsys, library
):
    monkeypatch.setattr(Baseline, "train_step", Mock(side_effect=ERRORS[library]))
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run")) == EXIT_OUT_OF_MEMORY
    (printed,) = errors(capsys)
    tried = "tried to allocate 67108864 bytes, " if library == "NCCL" else ""
    assert f"rank 0 is out of memory in the forward pass: {tried}" in printed
    assert "this fits by the formulas: " in printed


def test_the_plan_is_held_against_the_steps(sabotaged, tmp_path):
    plan = {"strategy": "baseline", "model": {"parameters": 10_960}, "seq_length": 16}
    plan |= {"machine": {"devices": 1, "fingerprint": "f" * 12}}
    plan |= {"micro_batch_size": 8, "gradient_accumulation_steps": 1, "data_parallel_size": 1}
    plan |= {"training": {"steps": 60, "seconds": 3600.0}, "costs": [{"usd_per_hour": 2.0}]}
    plan |= {"step": {"seconds": 1e-9, "uncorrected_seconds": 2e-9}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done, _ = sabotaged("", plan=tmp_path / "plan.json", max_train_steps=30)
    assert "% slower than planned: 30 min 0" in done.stdout
    assert "instead of 30 min 00 s, $1.00 instead of $1.00" in done.stdout
    block = read_record(tmp_path / "run")["plan"]
    assert block["planned_usd"] == 1.0
    assert block["seconds"] > block["planned_seconds"] == 1800
    assert block["fingerprint"] == "f" * 12
    assert block["planned_tokens_per_sec"] == pytest.approx(64e9)
    assert block["tokens_per_sec"] == pytest.approx(128e9 / block["step_vs_plan"])
    shown = recorded_of(tmp_path, "run").plan  # of the dashboard's page Live
    assert re.fullmatch(r"\d+% slower than planned, \$\S+ spent, \$1.00 expected instead of \$1.00", shown)


def test_the_next_line_resumes_the_run_and_then_evaluates_it(sabotaged, tmp_path):
    """Pasted as they are; the folder has a space, and the flags of the run need quotes."""
    done, _ = sabotaged(LIMIT_ON_THE_LAST_RANK, checkpoint_path=tmp_path / "a run", overwrite=True)
    words = next_words(done.stdout)
    assert words[0] == sys.executable
    assert words[-1] == "--resume"
    done = run_script(REPOSITORY / "src" / "gpt2.py", words[2:], cwd=tmp_path)
    finished(done)
    words = next_words(done.stdout)
    assert words[1] == str(REPOSITORY / "src" / "evaluate.py")
    finished(run_script(words[1], words[2:], cwd=tmp_path))


def next_words(output: str) -> list[str]:
    (line,) = [line for line in output.splitlines() if line.startswith("next: ")]
    return shlex.split(line)[1:]
