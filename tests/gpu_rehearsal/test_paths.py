"""What else runs on a GPU, on the stand-in: profiles, the monitor, generation, evaluation, serving, calibration."""

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
from forked_ranks import run_script
from small_run import command_line, write_inputs
from training_runs import SCRIPT, finished, read_record, resolved

from dsgpt.benchmarks import stand_in_gpu
from dsgpt.data.loader import Batch, CopiedAhead
from dsgpt.machine.device import bring_up
from dsgpt.planner import calibrate
from dsgpt.planner.rates import read_calibration
from dsgpt.strategies.base import build_strategy
from dsgpt.training.trainer import training_batches

SRC = Path(SCRIPT).parent
HERE = Path(__file__).parent


def on_stand_in(*words: object, cwd: Path):
    done = run_script(stand_in_gpu.__file__, words, cwd=cwd)
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


def test_two_gpus_are_calibrated(tmp_path):
    """Attention by head size and length, small shapes, what the device and its host need, and messages of each size."""
    on_stand_in("--gpus", 2, HERE / "calibrate_here.py", tmp_path / "calibration.json", cwd=tmp_path)
    found = read_calibration(tmp_path / "calibration.json")
    assert (found.kind, found.memory_bytes_per_device) == ("cuda", stand_in_gpu.MEMORY)
    assert [each.devices for each in found.ceilings] == [1, 2]
    for each in found.ceilings:
        assert each.matrix_flops_per_sec.keys() == {"fp32", "bf16", "fp16"}
        assert {rows for by_width in each.matrix_flops_per_sec.values() for rows in by_width[64]} == {16, 64}
        attention = {size: set(by_length) for size, by_length in each.attention_flops_per_sec["bf16"].items()}
        assert attention == {16: {32, 64}, 32: {32, 64}}
        assert each.operation_sec and each.kernel_sec
    alone, both = found.ceilings
    assert (alone.message_sec, alone.bus_bytes_per_sec) == ({}, None)
    sent = {operation: set(by_size) for operation, by_size in both.message_sec.items()}
    assert sent == {key: {1 << 12, 1 << 16} for key in ("all_reduce", "all_gather", "all_to_all", "send")}


def test_a_gpu_is_not_waited_for_after_every_call(monkeypatch):
    """Or starting and waiting would count as the time of every small shape, as they do in no training."""
    calls = []
    monkeypatch.setattr(calibrate, "_QUEUED_SEC", 0.01)
    with stand_in_gpu.stand_in_gpu() as ledger:
        clock = calibrate.Clock(torch.device("cuda"), seconds=0.05)
        clock.seconds(lambda: calls.append(time.sleep(1e-4)))
    assert 2 * sum(times for (what, *_), times in ledger.waits.items() if what == "synchronize") < len(calls)


def test_a_gpus_time_for_a_small_operation_is_without_what_keeps_it_busy(monkeypatch):
    """The stand-in executes at once, so what goes before would be counted if the first event came before it."""
    monkeypatch.setitem(calibrate.ELEMENTS, "cuda", 1 << 24)
    with stand_in_gpu.stand_in_gpu():
        clock = calibrate.Clock(torch.device("cuda"), seconds=0.01)
        large = torch.ones(1 << 24, device="cuda")
        busy = clock.seconds(lambda: large.add_(1))
        assert calibrate.kernel_sec(clock) < calibrate._AHEAD * busy / calibrate._SMALL / 2


def test_the_next_batch_is_copied_before_the_current_one_is_used(monkeypatch):
    """On a stream of its own, which the computation waits for: in this order, and no batch is lost or repeated."""
    calls = []
    with stand_in_gpu.stand_in_gpu():
        stream = type(torch.cuda.current_stream())
        monkeypatch.setattr(stream, "wait_stream", lambda *_: calls.append("wait"))

        def batches():
            for number in range(3):
                calls.append(f"read {number}")
                yield Batch(*(torch.full((1, 2), number).pin_memory() for _ in range(2)))

        for batch in CopiedAhead(batches(), torch.device("cuda")):
            assert {part.device.type for part in batch} == {"cuda"}
            calls.append(f"use {int(batch.targets.sum()) // 2}")
    assert calls == ["read 0", "wait", "read 1", "use 0", "wait", "read 2", "use 1", "wait", "use 2"]


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
