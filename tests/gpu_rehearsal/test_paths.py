"""What else runs on a GPU, on the stand-in: profiles, the monitor, generation, evaluation, serving, calibration."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from forked_ranks import run_script
from small_run import command_line, write_inputs
from training_runs import SCRIPT, finished, read_record, resolved

from dsgpt.benchmarks import stand_in_gpu
from dsgpt.machine.device import bring_up
from dsgpt.strategies.base import build_strategy
from dsgpt.training.trainer import training_batches

SRC = Path(SCRIPT).parent
HERE = Path(__file__).parent


def on_stand_in(script: Path | str, *words: object, cwd: Path):
    done = run_script(stand_in_gpu.__file__, [script, *words], cwd=cwd)
    finished(done)
    return done.stdout


@pytest.fixture(scope="module")
def profiled_run(tmp_path_factory) -> Path:
    """A run on the stand-in with both profiles and a monitor of GPUs that are not there either."""
    folder = write_inputs(tmp_path_factory.mktemp("paths"))
    words = command_line(folder, device="cuda", precision="fp32", max_train_steps=12, profile=2, profile_comm=2)
    on_stand_in(HERE / "with_stand_in_nvml.py", SCRIPT, *words, cwd=folder)
    return folder / "run"


def test_profiles_are_written(profiled_run):
    trace = json.loads(gzip.decompress((profiled_run / "profile" / "rank0.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"train_step", "forward", "backward", "optimizer"} <= names
    communication = json.loads((profiled_run / "communication.json").read_text())
    assert communication["steps"] == 2
    assert [rank["communication_sec"] for rank in communication["ranks"]] == [0]


def test_the_monitor_samples_the_gpu_of_the_run(profiled_run):
    """Watts of the stand-in driver are 200 and 300 in turn."""
    use = read_record(profiled_run)["summary"]["gpu_use"]
    (gpu,) = use["gpus"]
    assert 200 <= gpu["power_watts_mean"] <= gpu["power_watts_max"] == 300
    assert 0 < use["energy_joules"] == gpu["energy_joules"]


@pytest.mark.parametrize("options", [(), ("--precision", "bf16"), ("--temperature", "0", "--num_samples", "2")])
def test_a_gpu_generates_what_a_cpu_generates(profiled_run, options):
    words = ("--checkpoint", profiled_run, "--prompt", "The", "--max_new_tokens", 8, "--precision", "fp32", *options)
    done = run_script(SRC / "generate.py", [*words, "--device", "cpu"], cwd=profiled_run)
    finished(done)
    assert on_stand_in(SRC / "generate.py", *words, "--device", "cuda", cwd=profiled_run) == done.stdout


def test_a_gpu_evaluates_as_a_cpu_does(profiled_run):
    losses = {}
    for device in ("cpu", "cuda"):
        out = profiled_run / f"{device}.json"
        words = [SRC / "evaluate.py", "--checkpoint", profiled_run, "--data", profiled_run.parent / "val.bin"]
        words += ["--device", device, "--precision", "fp32", "--output", out]
        if device == "cuda":
            on_stand_in(*words, cwd=profiled_run)
        else:
            finished(run_script(words[0], words[1:], cwd=profiled_run))
        losses[device] = json.loads(out.read_text()) | {"device": "", "seconds": 0}
    assert losses["cuda"] == losses["cpu"]


def test_a_gpu_is_calibrated(tmp_path):
    on_stand_in(HERE / "calibrate_here.py", tmp_path / "calibration.json", cwd=tmp_path)
    calibration = json.loads((tmp_path / "calibration.json").read_text())
    assert calibration["hardware"]["device"] == "cuda"
    assert calibration["ceilings"]
    assert calibration["memory_bytes_per_device"] == stand_in_gpu.MEMORY


def graph_words(folder: Path, precision: str) -> list[str]:
    flags = {"device": "cuda", "compile": True, "cuda_graphs": True, "global_batch_size": 8, "grad_accum_steps": 4}
    return command_line(write_inputs(folder), precision=precision, **flags)


def test_every_micro_batch_begins_a_step_of_the_cuda_graphs(tmp_path, monkeypatch):
    """Or the results of one would be written over while they are read. The stand-in captures no graph."""
    modes, begun = [], []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(True))
    with stand_in_gpu.stand_in_gpu():
        monkeypatch.setattr(torch.nn.Module, "compile", lambda _model, mode: modes.append(mode))
        config = resolved(graph_words(tmp_path, "bf16"))
        strategy = build_strategy(config, bring_up("cuda", local_rank=0, threads=1))
        batches = training_batches(config, first_step=0)
        strategy.train_step(batches, 1)
        batches.close()
        monkeypatch.undo()
    assert (modes, len(begun)) == (["reduce-overhead"], 4)


def test_gradients_in_the_memory_of_a_cuda_graph_are_not_summed(tmp_path):
    done = run_script(stand_in_gpu.__file__, [SCRIPT, *graph_words(tmp_path, "fp32")], cwd=tmp_path)
    assert done.returncode == 2
    assert "over those of the last, which fp32 adds up there, 4 a step: take --precision bf16" in done.stderr
