"""The record of a run, its lines, and the sinks that write them."""

import errno
import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_run import command_line
from training_runs import LONG, SGD, finished, read_lines, read_record, train, write_optimizer_recipe

from dsgpt.common.errors import UserError
from dsgpt.machine.topology import ParallelSizes, Topology
from dsgpt.model.config import GPT2Config
from dsgpt.record.schema import RunRecord
from dsgpt.training import journal
from dsgpt.training import run as run_module
from dsgpt.training import saving as checkpoint_module
from dsgpt.training import trainer as completion
from dsgpt.training.command import train as train_here
from dsgpt.training.journal import Sink, Sinks
from dsgpt.training.saving import Saver

# The record of a run while it trains, and after it ended early.


def test_peak_memory_is_of_training(finished_run, tmp_path, monkeypatch):
    """A stand-in for the memory counter: a save and a generation need more than training."""
    peak = [1000]
    monkeypatch.setattr("dsgpt.telemetry.cost.peak_rss_bytes", lambda: peak[0])
    monkeypatch.setattr(Saver, "_write", lambda *args: peak.__setitem__(0, 9000))
    monkeypatch.setattr(Saver, "_complete", lambda *args: 0)
    flags = {"checkpoint_path": tmp_path / "run", "max_train_steps": 2}
    assert train_here(command_line(finished_run, **flags)) == 0
    assert read_record(tmp_path / "run")["summary"]["peak_rss_bytes_rank0"] == 1000


def test_a_busy_machine_is_recorded_and_said(finished_run, tmp_path, monkeypatch, capsys):
    """Both from the segment's own figures; ``tests/machine/test_device.py`` measures them."""
    load = {"load_average_before": 1.5, "cpu_share_of_others": 0.4}
    monkeypatch.setattr(journal.LoadOfOthers, "figures", lambda _: load)
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0
    assert "other processes used 40% of the CPUs during this measurement\n" in capsys.readouterr().out
    assert read_record(tmp_path / "run")["segments"][0].items() >= load.items()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError(), "the GPU has no memory left for a second copy of the model"),
        (RuntimeError("bf16 path needs avx512bw\nand more"), "bf16 path needs avx512bw; the trained model is saved"),
        (MemoryError(), "MemoryError; the trained model is saved"),
        (UserError("the model's logits are NaN"), "the model's logits are NaN; the trained model is saved"),
    ],
)
def test_a_training_does_not_fail_over_its_inference_figure(finished_run, tmp_path, monkeypatch, capsys, error, line):
    monkeypatch.setattr(completion, "measure_latency", Mock(side_effect=error))
    assert train_here(command_line(finished_run, checkpoint_path=tmp_path / "run")) == 0
    assert f"inference   not measured: {line}\n" in capsys.readouterr().out
    assert (read_record(tmp_path / "run")["status"], read_record(tmp_path / "run")["inference"]) == ("completed", None)
    assert (tmp_path / "run" / "RUN_COMPLETE.txt").is_file()


# The events that sinks receive from a run, and how it handles their write errors.


def test_a_tracker_is_one_more_sink(finished_run, tmp_path, monkeypatch):
    tracker, records = Mock(spec=[*vars(Sink), "publish"]), []
    tracker.record.side_effect = lambda now: records.append((now.status, now.summary.get("final_val_loss")))
    open_sinks, publish = journal.open_sinks, checkpoint_module.store.publish

    def published(*args: Any, **named: Any) -> Any:
        tracker.publish()
        return publish(*args, **named)

    monkeypatch.setattr(checkpoint_module.store, "publish", published)
    opened = lambda *args, **named: Sinks([*open_sinks(*args, **named)._sinks, tracker])  # noqa: E731
    monkeypatch.setattr(run_module, "open_sinks", opened)
    assert train_here(command_line(finished_run, **LONG, checkpoint_path=tmp_path / "run")) == 0
    calls = [name for name, *_ in tracker.mock_calls if name not in {"steps", "validation", "record"}]
    three, saved = ["step_taken"] * 3, ["sync", "publish"]
    assert calls == [*three[1:], "traffic", "step_taken", *saved, *(three + saved) * 3, "close"]
    lines = [line["step"] for call in tracker.steps.call_args_list for line in call.args[0]]
    assert lines == list(range(1, 13))
    validations = [call.args[0] for call in tracker.validation.call_args_list]
    assert [line["step"] for line in validations] == [4, 5, 8, 10, 12]
    *running, last = records
    assert last == ("completed", validations[-1]["val_loss"])
    assert {("running", line["val_loss"]) for line in validations} <= set(running), "each is in it at once"
    assert {status for status, _ in running} == {"running"}


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "lines")


def one_step(sink: Sink) -> None:
    sink.steps([{"step": 1}], due=False)


def test_a_write_error_is_reported_once_until_the_file_can_be_written(caplog, snapshot):
    sink = Mock(spec=Sink)
    several = Sinks([sink], stops=False)

    def send(what: str, event: Callable[[Sink], None], error: OSError | None = FULL) -> int:
        caplog.clear()
        sink.steps.side_effect = error
        several.try_to_send(what, event)
        return len(caplog.messages)

    assert send("lines", one_step) == 1
    assert send("record", lambda one: one.record(RunRecord(description={}))) == 0  # succeeds, and is another file
    assert send("lines", one_step) == 0
    assert send("lines", one_step, error=None) == 0
    assert send("lines", one_step) == 1
    assert caplog.messages == snapshot


def test_a_write_error_stops_the_run_unless_it_may_continue():
    refusing, tracker = Mock(spec=Sink), Mock(spec=Sink)
    refusing.steps.side_effect = FULL
    with pytest.raises(OSError, match="No space left"):
        Sinks([refusing], stops=True).try_to_send("lines", one_step)
    with pytest.raises(OSError, match="No space left"):
        Sinks([refusing], stops=False).send(one_step)
    Sinks([refusing, tracker]).send_if_possible(one_step)
    tracker.steps.assert_called_once_with([{"step": 1}], due=False)


# The values in the files of a run are right; `tests/goldens/test_runs.py` has their keys and lines.

CONSTANT_AFTER_2 = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory, corpus):
    """Two epochs of a baseline, short by their long sequences."""
    folder = tmp_path_factory.mktemp("records")
    recipe = write_optimizer_recipe(folder / "recipe.json")
    flags = ("--epochs", "2", "--grad_accum_steps", "2", "--seq_length", "64", "--global_batch_size", "64")
    finished(train(folder / "run", corpus, recipe, *flags))
    return folder / "run"


def test_a_run_of_one_process_has_one_segment_with_its_figures(run):
    record = read_record(run)
    (segment,) = record["segments"]
    assert (segment["first_step"], segment["last_step"]) == (1, record["summary"]["optimizer_steps"])
    assert segment["peak_rss_bytes_rank0"] > 10_000_000
    assert segment["train_time_sec"] == pytest.approx(record["summary"]["train_time_sec"])
    for key in ("mean_tokens_per_sec_global", "peak_rss_bytes_rank0"):
        assert segment[key] == record["summary"][key]
    for key in ("hardware", "env", "host", "git_commit", "command_line", "timestamp_utc", "resumed_from"):
        assert segment[key] == record[key]
    for key in ("strategy", "compile", "precision"):
        assert segment[key] == record["training_config"][key]


def test_the_figures_agree_with_the_steps(run):
    record, lines = read_record(run), read_lines(run)
    assert [epoch["epoch_idx"] for epoch in record["epochs"]] == [0, 1]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    for epoch in record["epochs"]:
        own = [line for line in lines if line["epoch"] == epoch["epoch_idx"]]
        assert epoch["steps"] == epoch["optimizer_steps"] == len(own) == record["training_config"]["steps_per_epoch"]
        assert epoch["micro_steps"] == 2 * len(own)
        assert epoch["tokens_processed_global"] == len(own) * 64 * 64
        assert epoch["train_loss_avg_global"] == pytest.approx(sum(line["loss"] for line in own) / len(own))
        assert epoch["train_time_sec"] == pytest.approx(sum(line["step_time_sec"] for line in own))
    timed = [line for line in lines if not line["warm_up"]]
    assert len(lines) - len(timed) == 3
    speed = len(timed) * 64 * 64 / sum(line["step_time_sec"] for line in timed)
    assert record["summary"]["mean_tokens_per_sec_global"] == pytest.approx(speed)
    assert record["train_throughput"] == record["summary"]["mean_tokens_per_sec_global"]
    assert record["summary"]["mean_tokens_per_sec_per_device"] == record["summary"]["mean_tokens_per_sec_global"]
    assert record["summary"]["flops_per_token"] == GPT2Config(**record["training_config"]["model"]).flops_per_token(64)
    assert record["train_loss_per_epoch"] == [epoch["train_loss_avg_global"] for epoch in record["epochs"]]
    evaluations = [line["val_loss"] for line in read_lines(run, "val_loss")]
    assert record["val_loss_per_epoch"] == evaluations
    assert record["summary"]["best_val_loss"] == min(evaluations)
    assert record["summary"]["final_train_loss"] == lines[-1]["loss"]
    assert lines[-1]["tokens"] == len(lines) * 64 * 64


def test_lines_for_the_user_have_figures_of_their_interval(run):
    lines = read_lines(run)
    shown = [line for line in lines if "interval" in line]
    assert [line["step"] for line in shown] == [1, *range(10, len(lines), 10), len(lines)]
    assert sum(line["interval"]["steps"] for line in shown) == len(lines)
    summary = read_record(run)["summary"]
    counted = [line for line in lines if not line["warm_up"]]
    waited, passed = (sum(line[key] for line in counted) for key in ("dataload_time_sec", "step_time_sec"))
    assert (summary["data_wait_share"], summary["data_wait_rank"]) == (pytest.approx(waited / passed), 0)


def test_a_loss_that_is_not_finite_ends_the_run(corpus, tmp_path):
    huge = {"type": "SGD", "params": {**SGD["params"], "lr": 1e30}}
    recipe = write_optimizer_recipe(tmp_path / "recipe.json", optimizer=huge, clipping=0)
    run = tmp_path / "run"
    flags = ("--max_train_steps", "12", "--save_every", "4", "--steps_per_print", "50")
    done = train(run, corpus, recipe, *flags, ranks=2)
    assert done.returncode == 3
    assert done.stderr.count("error: step") == 1
    assert "Traceback" not in done.stderr
    assert read_record(run)["status"] == "failed"
    assert not list(run.glob("step-*"))
    written = read_lines(run)
    assert any(line["loss"] is None or line["grad_norm"] is None for line in written)
    assert all(line["loss"] is None or math.isfinite(line["loss"]) for line in written)


def test_weights_that_are_not_finite_are_not_saved(corpus, tmp_path):
    """The loss of the saved step was computed before its update, so only the weights show what the update did."""
    infinite = {"type": "SGD", "params": {"lr": 1e38, "weight_decay": 1000.0}}
    recipe = write_optimizer_recipe(
        tmp_path / "recipe.json", optimizer=infinite, clipping=0, scheduler=CONSTANT_AFTER_2
    )
    run = tmp_path / "run"
    done = train(run, corpus, recipe, "--max_train_steps", "9", "--save_every", "3", "--max_val_steps", "1")
    assert done.returncode == 3
    assert "error: step 3: " in done.stderr
    assert not list(run.glob("*step-*"))


@pytest.mark.parametrize(
    ("faults", "replicas", "named"),
    [
        ([(0, 2.0), (0, 3.0)], 1, "rank 0 on host was the first to compute an activation or loss"),
        ([(0, math.inf), (0, 1.0), (1, math.inf), (1, math.inf)], 2, "rank 1 on host was"),
        ([(0, math.inf), (0, math.inf), (0, 1.0), (0, 1.0)], 2, ""),  # a stage's two replicas: the weights diverge
        ([(0, math.inf), (0, math.inf)], 2, ""),
    ],
)
def test_the_rank_that_was_first_is_named_and_not_a_part_of_the_model_that_diverges(
    faults, replicas, named, monkeypatch
):
    """Line and exchange of each rank's first figure that is not finite; the ranks of a stage follow each other."""
    ranks = [("host", (rank // replicas, 0, 0), (*fault, "an activation or loss")) for rank, fault in enumerate(faults)]
    monkeypatch.setattr(journal, "gather_objects", lambda _: ranks)
    sizes = ParallelSizes(pipeline=len(ranks) // replicas)
    topology = Topology(
        rank=0, local_rank=0, world_size=len(ranks), local_world_size=1, launcher="torchrun", sizes=sizes
    )
    own = SimpleNamespace(meter=SimpleNamespace(results=[]), _config=SimpleNamespace(topology=topology))
    said = journal.Journal._first_non_finite(own, [{"step": 7}, {"step": 8}])
    assert (named in said) if named else not said
