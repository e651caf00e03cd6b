"""Runs of several processes: which differences between them are shown, and where."""

import copy
from typing import Any

import pytest
from chart_records import record, step_lines, write_run

from dsgpt.charts.comparison import comparison_markdown, console_summary
from dsgpt.charts.plots import _warnings
from dsgpt.record.equal_work import judge, machine_line, machine_stamps, segment_stamps, setup_stamps
from dsgpt.record.runs import Run, read_run
from dsgpt.record.work import Segment, over_time

OTHER_CPU = {"cpu_name": "Other CPU"}
TWO_RANKS = {"world_size": 2}
TWO_THREADS = {"threads_per_device": 2}


def segment(first_step: int, last_step: int, **changes: Any) -> dict[str, Any]:
    """A segment on the fixture's machine; ``hardware`` and ``env`` among ``changes`` are laid over its own."""
    hardware = record()["hardware"] | changes.pop("hardware", {})
    env = {"python_version": "3.11.7", "torch_version": "2.13.0"} | changes.pop("env", {})
    return {
        "first_step": first_step, "last_step": last_step, "host": "fixture-host", "hardware": hardware, "env": env,
        "strategy": "zero1", "micro_batch_size_per_gpu": 8, "grad_accum_steps": 1, "compile": False,
        "activation_checkpointing": False, "quantized_weights": False, "quantized_gradients": False,
        "git_commit": "c" * 40, "train_time_sec": 40.0, "mean_tokens_per_sec_global": 128.0,
        "max_cuda_mem_allocated_bytes_rank0": None, "peak_rss_bytes_rank0": 2**30,
    } | changes  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """A run of 40 steps, the first 30 of them as the program's defaults and the others with ``changes``."""

    def read_segments(name: str = "b", *, first: dict[str, Any] | None = None, **changes: Any) -> Run:
        segments = [first or segment(1, 30), segment(31, 40, **changes)]
        values = record(segments=segments, resumed_from="step-00000030", changed_at_resume=[])
        return read_run(write_run(tmp_path / name, values, lines=step_lines()), name=name)

    return read_segments


@pytest.mark.parametrize(
    "changes",
    [
        {"hardware": TWO_THREADS},
        {"hardware": TWO_RANKS},
        {"strategy": "zero2"},
        {"compile": True},
        {"activation_checkpointing": True},
        {"micro_batch_size_per_gpu": 4},
        {"env": {"torch_version": "2.14.0"}},
    ],
    ids=str,
)
def test_a_setup_that_changed_is_stamped(read, snapshot, changes):
    assert setup_stamps([read(**changes)]) == snapshot


def test_a_resume_that_changed_nothing_is_not_stamped(read):
    run = read()
    assert setup_stamps([run]) == []
    assert (run.machine, run.devices, run.strategy) == ("Fixture CPU, 2 cores", "1 CPU device of 1 thread", "zero1")


def test_hardware_of_every_segment_counts(read, tmp_path, snapshot):
    """The hardware of the last segment alone is the same as the other run's."""
    moved = read(first=segment(1, 30, hardware=OTHER_CPU))
    plain = read_run(write_run(tmp_path / "a", record()), name="a")
    assert [machine_stamps([moved]), machine_stamps([plain, moved])] == snapshot
    assert machine_line([plain, moved]).startswith("several machines or devices.")


def test_other_host_launcher_and_code_are_notes(read, snapshot):
    run = read(
        host="next",
        hardware={"launcher": "torchrun"},
        git_commit="d" * 40,
        first=segment(1, 30, hardware={"launcher": "deepspeed"}),
    )
    assert setup_stamps([run]) == []
    assert run.notes[1:] == snapshot


def test_segments_without_a_step_are_ignored(tmp_path):
    values = record(segments=[segment(1, 40), segment(41, 40, strategy="ddp", hardware=OTHER_CPU)])
    run = read_run(write_run(tmp_path, values), name="a")
    assert (setup_stamps([run]), run.strategy) == ([], "zero1")


def test_a_value_per_segment_in_words():
    segments = [Segment(1, 10), Segment(11, 20), Segment(21, 40)]
    assert over_time(segments, ["a", "a", "a"]) == "a"
    assert over_time(segments, ["a", "a", "b"]) == "a to step 20, b from step 21"
    assert over_time(segments, ["a", None, "b"]) == "a to step 10, not recorded to step 20, b from step 21"
    assert over_time(segments, [None, None, None]) is None


def test_steps_without_a_record_are_stamped(tmp_path):
    """In a run resumed from a checkpoint of a version without segments, and in a record of such a version."""
    for name, values in {
        "gap": record(segments=[segment(31, 40)], resumed_from="step-00000030"),
        "old": record(resumed_from="step-00000030"),
    }.items():
        run = read_run(write_run(tmp_path / name, values), name=name)
        assert segment_stamps([run]) == [f"NOT RECORDED: how {name} executed its steps 1 to 30"]
        assert run.machine == "not recorded to step 30, Fixture CPU, 2 cores from step 31"
        assert machine_stamps([run]) == []


def test_the_peak_memory_of_the_last_process_alone_is_unknown(tmp_path):
    run = read_run(write_run(tmp_path, record(resumed_from="step-00000030")), name="old")
    assert run.host_memory is None
    assert "peak memory was recorded of the last process alone: treated as unknown" in run.notes
    assert read_run(write_run(tmp_path, record()), name="old").host_memory == 2**30


def test_zero_plus_plus_for_some_of_the_steps_is_another_training(read, snapshot):
    plain, mixed = read("a"), read("b", first=segment(1, 30, quantized_weights=True))
    assert judge([plain, mixed]).line() == snapshot
    twice = copy.deepcopy(mixed)
    assert judge([mixed, twice]).answer == "yes"


def test_the_stamps_are_on_page_console_and_pictures(read, tmp_path):
    run = read(strategy="zero2", train_time_sec=60.0, peak_rss_bytes_rank0=2**29)
    stamp = "SEGMENTS DIFFER: b: strategy zero1 to step 30, zero2 from step 31"
    assert stamp in console_summary([run])
    assert stamp in _warnings([run])
    text = comparison_markdown([run])
    assert f"**{stamp}**" in text
    assert "| b | 1 to 30 | zero1 | 1 CPU device of 1 thread | Fixture CPU, 2 cores | 40.0 | 128 | 1.07 |" in text
    assert "| b | 31 to 40 | zero2 | 1 CPU device of 1 thread | Fixture CPU, 2 cores | 60.0 | 128 | 0.54 |" in text
    assert "## Segments" not in comparison_markdown([read_run(write_run(tmp_path / "one", record()), name="one")])


@pytest.mark.parametrize(
    "segments", [None, [], "text", [3], [{}], [{"first_step": "1", "last_step": []}], [{"hardware": 3}]]
)
def test_invalid_segments_are_ignored(tmp_path, segments):
    run = read_run(write_run(tmp_path, record(segments=segments)), name="a")
    assert run.machine == "Fixture CPU, 2 cores"
