"""A resumed run is the run that was not stopped."""

from pathlib import Path
from typing import Any

import pytest
from small_run import RECIPE, command_line, without_paths, write_recipe
from training_runs import LONG, checkpoints, damage, errors, read_record, resume, steps_of, stop_after_9

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import Segment, highest_peaks, read_manifest, read_run_state
from dsgpt.machine import console
from dsgpt.record.equal_work import stamps
from dsgpt.record.runs import read_run
from dsgpt.training.command import train as train_here

# A resume continues exactly from what was saved, or refuses.


OPTIMIZERS = {
    "AdamW": RECIPE["optimizer"],
    "SGD": {"type": "SGD", "params": {"lr": 0.1}},
    "momentum": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_baseline_resumes_bit_for_bit(finished_run, tmp_path, capsys, monkeypatch, optimizer):
    """With dropout, and inside an epoch. The other strategies do in ``tests/strategies/test_on_ranks.py``."""
    run, recipe = tmp_path / "run", write_recipe(tmp_path / "recipe.json", optimizer=OPTIMIZERS[optimizer])
    flags = LONG | {"checkpoint_path": run, "deepspeed_config": recipe, "dropout": 0.1}
    assert train_here(command_line(finished_run, **flags)) == 0
    last = run / "step-00000012"
    old, steps, weights = read_record(run), steps_of(run), (last / "model.safetensors").read_bytes()
    config = (run / "config.json").read_bytes()
    assert (last / "optimizer.safetensors").exists() == (optimizer != "SGD")
    assert len({path.stat().st_mode for path in last.iterdir()}) == 1
    stop_after_9(run)
    monkeypatch.setattr(console, "LINE_SEC", 0)
    assert train_here(command_line(finished_run, **flags, resume=True)) == 0
    said = capsys.readouterr()
    assert f"resuming from {run / 'step-00000009'}" in said.out
    assert "loading the checkpoint: 50%, " in said.err and "loading the checkpoint: 100%, 0.0 s left" in said.err
    assert steps_of(run) == steps
    assert (last / "model.safetensors").read_bytes() == weights
    new = read_record(run)
    assert (old["resumed_from"], new["resumed_from"]) == (None, "step-00000009")
    assert (new["run_id"], (run / "config.json").read_bytes()) == (old["run_id"], config)
    for one, two in zip(old["epochs"], new["epochs"], strict=True):
        for key in ("steps", "train_loss_avg_global", "val_loss_avg_global", "tokens_processed_global"):
            assert two[key] == one[key]
    assert new["summary"]["optimizer_steps"] == 12
    assert new["summary"]["best_val_loss"] == old["summary"]["best_val_loss"]


# A resumed run continues the same run; damage is refused, or reported and survived.


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(stopped, finished_run):
    damage(stopped / "step-00000009" / "model.safetensors")
    assert resume(stopped, finished_run, keep_checkpoints=2, max_train_steps=12) == 0
    assert checkpoints(stopped) == [9, 12]
    for step in (9, 12):
        read_manifest(stopped / f"step-{step:08d}")


def test_refused_checkpoints_are_not_forgotten(stopped, finished_run, capsys, snapshot):
    """One was marked as damaged, and the others were lost later: a fresh start would remove what is left."""
    damage(stopped / "step-00000009" / "model.safetensors")
    store.mark_damaged(stopped / "step-00000009")
    for step in (3, 6):
        store.discard(stopped / f"step-{step:08d}")
    assert resume(stopped, finished_run) == 2
    (line,) = errors(capsys)
    assert without_paths(line, stopped) == snapshot
    assert (stopped / "step-00000009.damaged").is_dir()


def test_a_finished_run_stays_finished_whatever_its_newest_checkpoint_says(copied_run, finished_run, capsys):
    (copied_run / "step-00000012" / "manifest.json").write_text("{")
    assert resume(copied_run, finished_run) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_a_lost_latest_and_stale_folders_do_not_matter_and_a_lost_log_makes_sums_unknown(stopped, finished_run):
    for name in ("latest", "metrics.jsonl"):
        (stopped / name).unlink()
    for name in (".partial-step-00000010", ".partial-step-00000003.old"):
        (stopped / name).mkdir()
        (stopped / name / "half").write_bytes(b"...")
    before = read_record(stopped)["summary"]
    assert resume(stopped, finished_run) == 0
    assert read_record(stopped)["resumed_from"] == "step-00000009"
    summary = read_record(stopped)["summary"]
    assert all(summary[key] == before[key] for key in ("final_train_loss", "final_val_loss"))
    assert (summary["optimizer_steps"], summary["train_time_sec"]) == (12, None)
    assert (stopped / "latest").read_text() == "step-00000012\n"
    assert not list(stopped.glob(".partial-*"))


# The record of a run that several processes trained: figures of each, and sums and peaks over all.


RSS = "peak_rss_bytes_rank0"


# The counter of memory is a stand-in: a resident set of this process never gets smaller.
@pytest.fixture
def peak(monkeypatch) -> list[int]:
    """The peak memory of the next process, in bytes."""
    needed = [1]
    monkeypatch.setattr("dsgpt.telemetry.cost.peak_rss_bytes", lambda: needed[0])
    return needed


def spans(found: dict[str, Any]) -> list[tuple[int, int, int | None]]:
    return [(each["first_step"], each["last_step"], each[RSS]) for each in found["segments"]]


@pytest.fixture
def started(finished_run, tmp_path, peak) -> Path:
    """12 steps of a process that needed 5,000 bytes, killed after the 9th."""
    peak[0] = 5000
    flags = LONG | {"checkpoint_path": tmp_path / "run", "threads_per_device": 1}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert spans(read_record(tmp_path / "run")) == [(1, 12, 5000)]
    return stop_after_9(tmp_path / "run")


def test_the_record_has_each_process_and_what_they_share(started, finished_run, peak):
    peak[0] = 2000
    other = {"micro_batch_size_per_gpu": 1, "threads_per_device": 2, "activation_checkpointing": True}
    assert resume(started, finished_run, **other) == 0
    found = read_record(started)
    first, second = found["segments"]
    assert [each["resumed_from"] for each in (first, second)] == [None, "step-00000009"]
    assert [each["hardware"]["threads_per_device"] for each in (first, second)] == [1, 2]
    assert [each["micro_batch_size_per_gpu"] for each in (first, second)] == [8, 1]
    assert [each["activation_checkpointing"] for each in (first, second)] == [False, True]
    total = found["summary"]["train_time_sec"]
    assert first["train_time_sec"] + second["train_time_sec"] == pytest.approx(total, rel=1e-9)
    for block, different in (("env", {}), ("hardware", {"threads_per_device": None})):
        assert found[block] == first[block] | different
    config = found["training_config"]
    assert config["micro_batch_size_per_gpu"] is config["activation_checkpointing"] is None
    assert (found["host"], config["strategy"]) == (first["host"], "baseline")
    said = [line for line in stamps([read_run(started, name="run")]) if not line.startswith("A BUSY MACHINE")]
    assert "".join(said) == (
        "SEGMENTS DIFFER: run: devices 1 CPU device of 1 thread to step 9, 1 CPU device of 2 threads from step 10; "
        "micro batch x accumulation 8 x 1 to step 9, 1 x 8 from step 10; activation checkpointing no to step 9, yes "
        "from step 10"
    )


def test_segments_are_those_that_led_to_the_checkpoint(started, finished_run, peak):
    """A process whose steps were lost has no segment, and its peak is left out.

    Epochs, of 5 steps, have the peak of those that took part: the second process took the end of the second epoch.
    """
    for needed in (9000, 2000):
        peak[0] = needed
        assert resume(started, finished_run) == 0
        found = read_record(started)
        assert spans(found) == [(1, 9, 5000), (10, 12, needed)]
        assert found["summary"][RSS] == max(5000, needed)
        assert [epoch[RSS] for epoch in found["epochs"]] == [5000, max(5000, needed), needed]
        state = read_run_state(started / "step-00000012")
        assert [(each.first_step, each.last_step) for each in state.segments] == [(1, 9), (10, 12)]
        stop_after_9(started)


def test_a_process_that_takes_no_step_changes_no_step(started, finished_run, peak):
    assert resume(started, finished_run) == 0
    (started / "RUN_COMPLETE.txt").unlink()
    peak[0] = 7000
    assert resume(started, finished_run) == 0
    found = read_record(started)
    assert spans(found) == [(1, 9, 5000), (10, 12, 5000), (13, 12, 7000)]
    assert found["segments"][2]["train_time_sec"] == 0


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
        ([segment(1, 5, **{RSS: 7}), segment(7, 9, **{RSS: 3})], None, None),
        ([segment(1, 5, max_cuda_mem_allocated_bytes_rank0=8, **GPU), segment(6, 9, **{RSS: 3})], None, 8),
        ([segment(1, 5, max_cuda_mem_allocated_bytes_rank0=8, **GPU), segment(6, 9, **GPU)], None, None),
    ],
)
def test_a_peak_is_known_if_every_segment_has_its_own(segments, rss, allocated):
    """A segment on a CPU has no GPU memory; the peak of the other segments is known all the same."""
    last = segments[-1].last_step if segments else 5
    found = highest_peaks(segments, first_step=1, last_step=last)
    assert (found[RSS], found["max_cuda_mem_allocated_bytes_rank0"]) == (rss, allocated)
