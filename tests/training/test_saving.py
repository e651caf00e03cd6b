"""Saving: asynchronously, when asked to stop, and under launchers; and the end of data workers."""

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file
from small_run import command_line, without_paths
from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from training_runs import LONG, SCRIPT, after_step, assert_same_training, checkpoints, errors, read_record

from dsgpt.benchmarks.faults_runs import default_sighup
from dsgpt.checkpoints import training_state
from dsgpt.common.errors import EXIT_STOPPED
from dsgpt.data import loader as loading
from dsgpt.data.loader import WindowDataset
from dsgpt.machine.launcher import ignore_stop_signals, launcher_command
from dsgpt.strategies.pytorch import Baseline
from dsgpt.training import saving as checkpoint
from dsgpt.training.command import train as train_here
from dsgpt.training.journal import Journal
from dsgpt.training.saving import Saver
from dsgpt.training.trainer import Batches

# Checkpoints that are written while training continues.


def trained(finished_run: Path, run_dir: Path, **flags: Any) -> int:
    """The run of ``finished_run`` once more, with checkpoints in the background."""
    return train_here(command_line(finished_run, **LONG | {"checkpoint_path": run_dir, "save_mode": "async"} | flags))


def test_a_checkpoint_is_of_its_step_however_late_it_is_written(finished_run, tmp_path, monkeypatch, capsys):
    """The one of step 3 is not written before step 5 was taken; the next save waits for it."""
    taken, original_write = threading.Event(), training_state.write_shards

    def write(*args: Any, **values: Any) -> Any:
        assert taken.wait(60)
        return original_write(*args, **values)

    after_step(monkeypatch, 5, taken.set)
    monkeypatch.setattr(training_state, "write_shards", write)
    assert trained(finished_run, tmp_path / "run") == 0
    assert checkpoints(tmp_path / "run") == [3, 6, 9, 12]
    for step in (3, 6, 9, 12):
        for name in ("model.safetensors", "optimizer.safetensors"):
            ours, theirs = (
                load_file(run / f"step-{step:08d}" / name) for run in (tmp_path / "run", finished_run / "run")
            )
            assert ours.keys() == theirs.keys()
            assert all(ours[key].equal(theirs[key]) for key in theirs), (step, name)
    saves = read_record(tmp_path / "run")["saves"]
    assert [(save["step"], save["mode"]) for save in saves] == [(3, "async"), (6, "async"), (9, "async"), (12, "sync")]
    assert all(0 < save["save_stall_sec"] <= save["save_total_sec"] for save in saves)
    assert saves[0]["save_stall_sec"] < saves[0]["save_total_sec"]
    assert saves[0]["bytes"] > 1000
    assert "s; training waited 0.0" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_failure_in_the_background_is_reported(finished_run, tmp_path, monkeypatch, capsys, snapshot, policy):
    original = checkpoint.store.publish

    def publish(run_dir: Path, folder: Path, **values: Any) -> Path:
        if folder.name.endswith("6"):
            raise OSError(28, "No space left on device", str(folder))
        return original(run_dir, folder, **values)

    monkeypatch.setattr(checkpoint.store, "publish", publish)
    code = trained(finished_run, tmp_path / "run", on_save_failure=policy)
    assert not list((tmp_path / "run").glob(".partial-*"))
    if policy == "stop":
        assert code == 4
        (line,) = errors(capsys)
        assert checkpoints(tmp_path / "run") == [3]
        assert read_record(tmp_path / "run")["status"] == "failed"
    else:
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "not saved" in line]
        assert code == 0
        assert checkpoints(tmp_path / "run") == [3, 9, 12]
        assert read_record(tmp_path / "run")["summary"]["failed_saves"] == 1
    assert without_paths(line, tmp_path) == snapshot


def test_a_failure_in_the_background_does_not_keep_the_last_step_from_being_saved(
    finished_run, tmp_path, monkeypatch, capsys
):
    original, last = checkpoint.store.publish, threading.Event()

    def publish(run_dir: Path, folder: Path, **values: Any) -> Path:
        if folder.name.endswith("9"):
            assert last.wait(60)
            raise MemoryError("no memory")
        return original(run_dir, folder, **values)

    def end() -> None:
        last.set()
        for thread in threading.enumerate():
            if thread.name == "background":
                thread.join()  # its failure may be noticed before the last save, and must not end the run there

    monkeypatch.setattr(checkpoint.store, "publish", publish)
    after_step(monkeypatch, 12, end)
    assert trained(finished_run, tmp_path / "run") == 0
    assert "step      9/12  not saved: " in (said := capsys.readouterr().out)
    assert "earlier checkpoints are untouched; the current step is saved now" in said
    assert checkpoints(tmp_path / "run") == [3, 6, 12]


def test_memory_that_cannot_be_allocated_is_a_failed_save(finished_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_state, "_fill", Mock(side_effect=RuntimeError("can't allocate memory")))
    assert trained(finished_run, tmp_path / "run", on_save_failure="continue") == 0
    assert capsys.readouterr().out.count("not saved: rank 0: RuntimeError: can't allocate memory") == 3
    assert checkpoints(tmp_path / "run") == [12]
    assert not list((tmp_path / "run").glob(".partial-*"))


@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_fails_completes_its_last_checkpoint_or_says_why_not(
    finished_run, tmp_path, monkeypatch, capsys, saves
):
    """A run that an error ends does not lose a checkpoint that is nearly written."""
    original, failing = training_state.write_shards, threading.Event()

    def write(*args: Any, **values: Any) -> Any:
        assert failing.wait(60)
        if not saves:
            raise OSError(28, "No space left on device")
        return original(*args, **values)

    def step_done(self: Journal, *args: Any, step: int, **values: Any) -> None:
        if step == 4:
            failing.set()
            raise RuntimeError("a fault")

    monkeypatch.setattr(training_state, "write_shards", write)
    monkeypatch.setattr(Journal, "step_done", step_done)
    with pytest.raises(RuntimeError, match="a fault"):
        trained(finished_run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == ([3] if saves else [])
    found = read_record(tmp_path / "run")
    assert [save["step"] for save in found["saves"]] == ([3] if saves else [])
    assert found["summary"]["failed_saves"] == (not saves)
    said = "step      3/12  not saved: rank 0: No space left on device; earlier checkpoints are untouched"
    assert (said in capsys.readouterr().out) is not saves


# Requests to stop a run whose output nobody reads. Other tests of signals: `tests/benchmarks/test_faults.py`.


def test_a_run_whose_output_is_closed_still_saves(finished_run, tmp_path):
    """For example, Ctrl-C ends ``tee`` first in ``... | tee log``, or the terminal was closed."""
    endless = LONG | {"max_train_steps": 100_000, "save_every": 0, "eval_every": 0, "steps_per_print": 1}
    words = command_line(finished_run, **endless, checkpoint_path=tmp_path / "run")
    command = [*launcher_command("python", 1), SCRIPT, *words]
    with default_sighup():
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with run:
        assert any(line.startswith("step ") for line in run.stdout)
        run.stdout.close()
        for _ in range(2):  # a terminal that is closed sends it again when its shell has gone
            run.send_signal(signal.SIGHUP)
            time.sleep(0.3)
        assert run.wait(60) == EXIT_STOPPED
    (step,) = checkpoints(tmp_path / "run")
    assert (found := read_record(tmp_path / "run"))["status"] == "interrupted"
    assert found["summary"]["optimizer_steps"] == step


# One script with data workers, and under launchers; a user's mistake is one line from one rank.


def test_data_workers_do_not_change_the_training(finished_run, tmp_path):
    run = tmp_path / "run"
    assert train_here(command_line(finished_run, **LONG, checkpoint_path=run, num_workers=2)) == 0
    assert_same_training(finished_run / "run", run, loss=0, norm=0)


@pytest.mark.long
@pytest.mark.parametrize(("launcher", "code"), [("deepspeed", 2), ("torchrun", 1)])
def test_a_mistake_is_printed_once(finished_run, tmp_path, launcher, code):
    flags = {"run_type": "optimized", "epochs": 0, "deepspeed_config": tmp_path / "missing.json"}
    command = [*launcher_command(launcher, 2), SCRIPT, *command_line(finished_run, **flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code
    one, other = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert one == "error: --epochs must be a whole number of at least 1, not 0"
    assert "missing.json: cannot be read" in other
    if launcher == "torchrun":  # its summary ends with our lines and a rule
        assert "missing.json: cannot be read" in done.stderr.splitlines()[-2]
    assert "gpt2.py" not in done.stderr.split("error: --epochs")[0].rpartition("Traceback")[2]


# The worker processes of data loaders end with the training, whatever ends it.


@pytest.fixture
def here(here: Path) -> Iterator[Path]:
    """The same; it ends the workers that a failed test left: pytest would wait for them when it exits."""
    yield here
    for loader in [each for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]:
        loader._shutdown_workers()


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("a defect")


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Saver, "save"), (Baseline, "train_step"), (Baseline, "eval_step"), (WindowDataset, "__getitems__")],
    ids=["save", "step", "validation", "worker"],
)
def test_no_worker_outlives_an_error(here, monkeypatch, owner, method):
    """``caught`` keeps the frames of the training, and in them its loaders, as an error on its way to the exit does."""
    monkeypatch.setattr(owner, method, fail)
    with pytest.raises(RuntimeError, match="a defect") as caught:
        train_here(command_line(here, num_workers=2, save_every=1))
    assert multiprocessing.active_children() == [], caught


def test_no_worker_starts_in_the_middle_of_a_run_or_outlives_it(here, monkeypatch):
    """Beside the threads of collectives a fork can deadlock: it did at validations, when a signal came."""
    started, start, file = [], BaseProcess.start, here / "run" / "metrics.jsonl"

    def noted(self: BaseProcess) -> None:
        started.append(file.read_text() if file.exists() else "")
        start(self)

    monkeypatch.setattr(BaseProcess, "start", noted)
    assert train_here(command_line(here, num_workers=2, eval_every=1)) == 0
    assert started == ["", ""]
    assert multiprocessing.active_children() == []


def test_a_worker_that_is_stuck_ends_the_run(here, monkeypatch):
    monkeypatch.setattr(loading, "WORKER_SEC", 0.5)
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # seconds that torch waits before it ends workers
    monkeypatch.setattr(WindowDataset, "__getitems__", lambda *_: time.sleep(600))
    with pytest.raises(RuntimeError, match="timed out after"):
        train_here(command_line(here, num_workers=1))
    assert multiprocessing.active_children() == []
    assert json.loads((here / "run" / "training_metrics.json").read_text())["status"] == "failed"


def _interrupted_at_its_start(worker: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    ignore_stop_signals(worker)


def test_a_signal_at_the_start_of_a_worker_is_ignored():
    """Ctrl-C reaches workers too, and a validation that begins at that moment starts new ones."""
    with contextlib.closing(
        Batches(DataLoader(range(4), num_workers=1, worker_init_fn=_interrupted_at_its_start))
    ) as read:
        assert [int(number) for number in read] == [0, 1, 2, 3]
