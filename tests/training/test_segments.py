"""The record of a run that several processes trained: figures of each, and sums and peaks over all."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_folders import LONG, record, resume, rewrite
from small_run import command_line
from training_runs import finished, read_record, train, write_recipe

from dsgpt.checkpoints.manifest import Segment, covers, highest_peaks, parse_manifest, read_run_state
from dsgpt.record.equal_work import segment_stamps
from dsgpt.record.runs import read_run
from dsgpt.training.command import train as train_here
from dsgpt.training.resume import NEVER_CHANGES
from dsgpt.training.run_description import CHANGEABLE

RSS = "peak_rss_bytes_rank0"
WIDE = ("--vocab_size", "40000", "--seq_length", "64", "--global_batch_size", "16", "--max_train_steps", "4",
        "--max_val_steps", "1", "--save_every", "2")  # fmt: skip
LARGE = ("--micro_batch_size_per_gpu", "16", "--threads_per_device", "2")
SMALL = ("--micro_batch_size_per_gpu", "1", "--threads_per_device", "1", "--activation_checkpointing")


@pytest.fixture(scope="module")
def resumed(corpus, tmp_path_factory) -> Path:
    """Four steps of two real processes: one took micro batches of 16 on two threads, then one of 1 on one thread."""
    folder = tmp_path_factory.mktemp("segments")
    recipe = write_recipe(folder / "recipe.json")
    finished(train(folder / "run", corpus, recipe, *WIDE, *LARGE, by="python"))
    (folder / "run" / "RUN_COMPLETE.txt").unlink()
    shutil.rmtree(folder / "run" / "step-00000004")
    finished(train(folder / "run", corpus, recipe, *WIDE, *SMALL, "--resume", by="python"))
    return folder / "run"


def test_the_peak_is_that_of_the_process_that_needed_most(resumed):
    found = read_record(resumed)
    first, second = found["segments"]
    assert first[RSS] > second[RSS] + 50e6
    assert found["summary"][RSS] == found["epochs"][0][RSS] == first[RSS]


def test_each_segment_records_how_its_process_trained(resumed):
    found = read_record(resumed)
    first, second = found["segments"]
    assert [(each["first_step"], each["last_step"]) for each in (first, second)] == [(1, 2), (3, 4)]
    assert [each["resumed_from"] for each in (first, second)] == [None, "step-00000002"]
    assert [each["hardware"]["threads_per_device"] for each in (first, second)] == [2, 1]
    assert [each["micro_batch_size_per_gpu"] for each in (first, second)] == [16, 1]
    assert [each["activation_checkpointing"] for each in (first, second)] == [False, True]
    assert "--resume" in second["command_line"] and "--resume" not in first["command_line"]


def test_times_of_the_processes_add_up(resumed):
    found = read_record(resumed)
    for name, tolerance in (("train_time_sec", 1e-9), ("wall_time_sec", 0.05)):
        total = found["summary"]["total_wall_time_sec" if name == "wall_time_sec" else name]
        assert sum(each[name] for each in found["segments"]) == pytest.approx(total, rel=tolerance)


def test_the_top_of_the_record_has_what_all_segments_share(resumed):
    found = read_record(resumed)
    assert found["hardware"]["threads_per_device"] is None
    assert found["training_config"]["micro_batch_size_per_gpu"] is None
    assert found["training_config"]["activation_checkpointing"] is None
    first = found["segments"][0]
    for block in ("env", "hardware"):
        different = {"threads_per_device"} & found[block].keys()
        assert {key: value for key, value in found[block].items() if key not in different} == {
            key: value for key, value in first[block].items() if key not in different
        }
    assert (found["host"], found["training_config"]["strategy"]) == (first["host"], "baseline")


def test_the_measured_step_names_its_process(resumed):
    cost = read_record(resumed)["cost"]
    segment = read_record(resumed)["segments"][cost["segment"]]
    assert (cost["measured_step"], cost["segment"]) == (4, 1)
    assert segment["first_step"] <= cost["measured_step"] <= segment["last_step"]


def test_the_charts_say_what_changed_and_when(resumed):
    (stamp,) = segment_stamps([read_run(resumed, name="run")])
    assert stamp == (
        "SEGMENTS DIFFER: run: devices 1 CPU device of 2 threads to step 2, 1 CPU device of 1 thread from step 3; "
        "micro batch x accumulation 16 x 1 to step 2, 1 x 16 from step 3; activation checkpointing no to step 2, yes "
        "from step 3"
    )


# With a stand-in for the counter of memory, in this process


@pytest.fixture
def peak(monkeypatch) -> list[int]:
    """The peak memory of the next process, in bytes."""
    needed = [1]
    monkeypatch.setattr("dsgpt.telemetry.memory.peak_rss_bytes", lambda: needed[0])
    return needed


def spans(found: dict[str, Any]) -> list[tuple[int, int, int | None]]:
    return [(each["first_step"], each["last_step"], each[RSS]) for each in found["segments"]]


def stop_after_9(run_dir: Path) -> None:
    """As a kill would have left it."""
    (run_dir / "RUN_COMPLETE.txt").unlink()
    shutil.rmtree(run_dir / "step-00000012")


@pytest.fixture
def started(finished_run, tmp_path, peak) -> Path:
    """12 steps of a process that needed 5,000 bytes, killed after the 9th."""
    peak[0] = 5000
    assert train_here(command_line(finished_run, **LONG, checkpoint_path=tmp_path / "run")) == 0
    assert spans(record(tmp_path / "run")) == [(1, 12, 5000)]
    stop_after_9(tmp_path / "run")
    return tmp_path / "run"


def test_segments_are_those_that_led_to_the_checkpoint(started, finished_run, peak):
    """A process whose steps were lost has no segment, and its peak is left out."""
    for needed in (9000, 2000):
        peak[0] = needed
        assert resume(started, finished_run) == 0
        found = record(started)
        assert spans(found) == [(1, 9, 5000), (10, 12, needed)]
        assert found["summary"][RSS] == max(5000, needed)
        state = read_run_state(started / "step-00000012")
        assert [(each.first_step, each.last_step) for each in state.segments] == [(1, 9), (10, 12)]
        stop_after_9(started)


def test_epochs_have_the_peak_of_those_that_took_part_in_them(started, finished_run, peak):
    """Epochs have 5 steps: the second process took the end of the second epoch, and the third."""
    peak[0] = 2000
    assert resume(started, finished_run) == 0
    assert [epoch[RSS] for epoch in record(started)["epochs"]] == [5000, 5000, 2000]


def test_a_process_that_takes_no_step_changes_no_step(started, finished_run, peak):
    assert resume(started, finished_run) == 0
    (started / "RUN_COMPLETE.txt").unlink()
    peak[0] = 7000
    assert resume(started, finished_run, threads_per_device=2) == 0
    found = record(started)
    assert spans(found) == [(1, 9, 5000), (10, 12, 5000), (13, 12, 7000)]
    assert found["segments"][2]["train_time_sec"] == 0


def test_fields_known_without_segments_can_never_change(finished_run):
    assert parse_manifest(finished_run / "run" / "step-00000009").fixed.keys() >= NEVER_CHANGES
    assert not NEVER_CHANGES & {name for names in CHANGEABLE.values() for name in names}


def test_steps_before_an_old_checkpoint_are_unknown(started, finished_run, peak):
    """The smaller known figure is never used; after another resume it is still unknown."""
    file = started / "step-00000009" / "run_state.json"
    state = json.loads(file.read_text())
    del state["segments"]
    rewrite(started / "step-00000009", file, json.dumps(state).encode())
    peak[0] = 2000
    assert resume(started, finished_run) == 0
    (started / "RUN_COMPLETE.txt").unlink()
    assert resume(started, finished_run, max_train_steps=14, allow_changed="recipe") == 0
    found = record(started)
    assert spans(found) == [(10, 12, 2000), (13, 14, 2000)]
    assert found["summary"][RSS] is None
    assert [epoch[RSS] for epoch in found["epochs"]] == [5000, None, 2000, 2000]
    assert (found["host"], found["hardware"]["cpu_count"], found["env"]["torch_version"]) == (None, None, None)
    assert found["training_config"]["strategy"] is None
    assert found["training_config"]["seed"] == 1337  # which no process may change
    assert found["training_config"]["precision"] == "fp32"  # no process may change this either
    assert found["training_config"]["quantized_weights"] is None
    assert found["summary"]["train_time_sec"] > 0  # from the lines of its steps


# Peaks


def segment(first_step: int, last_step: int, **values: Any) -> Segment:
    unknown = dict.fromkeys(Segment.__dataclass_fields__)
    return Segment(
        **unknown | {"hardware": {"device": "cpu"}} | values | {"first_step": first_step, "last_step": last_step}
    )


GPU = {"hardware": {"device": "cuda"}}


@pytest.mark.parametrize(
    ("segments", "rss", "allocated"),
    [
        ([], None, None),
        ([segment(1, 5, **{RSS: 7})], 7, None),
        ([segment(1, 5, **{RSS: 7}), segment(6, 9, **{RSS: 3})], 7, None),
        ([segment(1, 5, **{RSS: 7}), segment(7, 9, **{RSS: 3})], None, None),
        ([segment(1, 5), segment(6, 9, **{RSS: 3})], None, None),
        ([segment(1, 5, max_cuda_mem_allocated_bytes_rank0=8, **GPU), segment(6, 9, **{RSS: 3})], None, 8),
        ([segment(1, 5, max_cuda_mem_allocated_bytes_rank0=8, **GPU), segment(6, 9, **GPU)], None, None),
    ],
)
def test_a_peak_is_known_if_every_segment_has_its_own(segments, rss, allocated):
    """A segment on a CPU has no GPU memory; the peak of the other segments is known all the same."""
    last = segments[-1].last_step if segments else 5
    found = highest_peaks(segments, first_step=1, last_step=last)
    assert (found[RSS], found["max_cuda_mem_allocated_bytes_rank0"]) == (rss, allocated)


def test_covered_steps():
    segments = [segment(1, 5), segment(6, 5), segment(6, 9)]
    assert covers(segments, first_step=1, last_step=9)
    assert covers(segments[1:], first_step=7, last_step=9)
    assert not covers(segments[1:], first_step=5, last_step=9)
    assert not covers(segments, first_step=1, last_step=10)
