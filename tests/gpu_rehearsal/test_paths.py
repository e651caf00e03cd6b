"""What else runs on a GPU, on the stand-in: profiles, the monitor, generation, evaluation, serving, calibration."""

import gzip
import json
from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import command_line, write_inputs
from training_runs import SCRIPT, finished, read_record

from dsgpt.benchmarks import stand_in_gpu

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
