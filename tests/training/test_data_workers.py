"""The worker processes of data loaders end with the training, whatever ends it."""

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from small_run import command_line, write_data, write_recipe
from torch.utils.data import DataLoader, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dsgpt.data import loader as loading
from dsgpt.data.loader import WindowDataset
from dsgpt.machine.launcher import ignore_stop_signals
from dsgpt.strategies.pytorch import Baseline
from dsgpt.training.command import train as train_here
from dsgpt.training.saving import Saver
from dsgpt.training.trainer import Batches


@pytest.fixture(autouse=True)
def workers_left() -> Iterator[None]:
    """End the workers that a failed test left: pytest would wait for them when it exits."""
    yield
    for loader in [each for each in gc.get_objects() if type(each) is _MultiProcessingDataLoaderIter]:
        loader._shutdown_workers()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    write_recipe(tmp_path / "recipe.json")
    return write_data(tmp_path)


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


def test_no_worker_starts_in_the_middle_of_a_run(here, monkeypatch):
    """Beside the threads of collectives a fork can deadlock: it did at validations, when a signal came."""
    started = []
    start = BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", lambda self: (started.append(len(lines(here))), start(self))[1])
    assert train_here(command_line(here, num_workers=2, eval_every=1)) == 0
    assert started == [0, 0]


def lines(folder: Path) -> list[str]:
    file = folder / "run" / "metrics.jsonl"
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def test_a_worker_that_is_stuck_ends_the_run(here, monkeypatch):
    monkeypatch.setattr(loading, "WORKER_SEC", 0.5)
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # seconds that torch waits before it ends workers
    monkeypatch.setattr(WindowDataset, "__getitems__", lambda *_: time.sleep(600))
    with pytest.raises(RuntimeError, match="timed out after"):
        train_here(command_line(here, num_workers=1))
    assert multiprocessing.active_children() == []
    assert json.loads((here / "run" / "training_metrics.json").read_text())["status"] == "failed"


def test_no_worker_outlives_a_run(here):
    assert train_here(command_line(here, num_workers=2, eval_every=1)) == 0
    assert multiprocessing.active_children() == []


def _interrupted_at_its_start(worker: int) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    ignore_stop_signals(worker)


def test_a_signal_at_the_start_of_a_worker_is_ignored():
    """Ctrl-C reaches workers too, and a validation that begins at that moment starts new ones."""
    with contextlib.closing(
        Batches(DataLoader(range(4), num_workers=1, worker_init_fn=_interrupted_at_its_start))
    ) as read:
        assert [int(number) for number in read] == [0, 1, 2, 3]
