"""Reads that fail, stall, or find another file: each is named, and nothing is read as zeros."""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from small_run import command_line, random_ids, without_paths, write_tokens
from training_runs import after_step

from dsgpt.data import loader
from dsgpt.data.loader import TokenReader
from dsgpt.data.token_file import TokenFileError, open_token_file
from dsgpt.training.command import train as train_here

IDS = random_ids(5000)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenReader:
    monkeypatch.setattr(loader, "PAUSES_SEC", (0.01, 0.02))
    return TokenReader(open_token_file(write_tokens(tmp_path / "a.bin", IDS)))


def read(reader: TokenReader, first: int = 100, count: int = 2000) -> list[int]:
    ids = np.zeros(count, dtype="<u2")
    reader.read(first, ids)
    reader.check()
    return ids.tolist()


def preadv(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Call ``before`` with the number of each read, before the read."""
    real, calls = os.preadv, iter(range(1000))

    def called(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        before(next(calls))
        return real(descriptor, [buffers[0][:1000]], offset)  # the system may return less than was asked for

    monkeypatch.setattr(os, "preadv", called)


def test_a_read_that_fails_is_tried_again(reader, monkeypatch, caplog, tmp_path):
    def fails(call: int) -> None:
        if call in {1, 2}:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    preadv(monkeypatch, fails)
    assert read(reader) == IDS[100:2100].tolist()
    what = f"{tmp_path}/a.bin: cannot be read at byte 200 (Input/output error): trying again in"
    assert [record.getMessage() for record in caplog.records] == [f"{what} 0.01 s", f"{what} 0.02 s"]


def test_a_mount_that_comes_back_is_opened_anew(reader, monkeypatch, tmp_path):
    assert read(reader) == IDS[100:2100].tolist()
    reader.close()
    assert reader._descriptor is None
    (tmp_path / "a.bin").rename(tmp_path / "away")
    monkeypatch.setattr(time, "sleep", lambda _: (tmp_path / "away").rename(tmp_path / "a.bin"))
    assert read(reader, 7, 5) == IDS[7:12].tolist()


def shorter(path: Path) -> None:
    os.truncate(path, 3000)


def zeros(path: Path) -> None:
    """As it is after a file was written anew in place, and not to its end yet."""
    os.truncate(path, 3000)
    os.truncate(path, 10_000)


@pytest.mark.parametrize("change", [shorter, zeros, Path.unlink])
@pytest.mark.parametrize("opened", [True, False])
def test_another_file_ends_the_run(reader, tmp_path, change, opened, snapshot):
    """Before it was opened and while it is open; one that was removed while it is open is still whole."""
    if opened:
        read(reader)
    change(tmp_path / "a.bin")
    if change is Path.unlink and opened:
        assert read(reader) == IDS[100:2100].tolist()
        return
    with pytest.raises(TokenFileError) as caught:
        read(reader)
    assert without_paths(str(caught.value), tmp_path) == snapshot


def test_a_mount_that_vanishes_behind_a_read_is_named(reader, monkeypatch, tmp_path):
    read(reader)
    with monkeypatch.context() as patch, pytest.raises(TokenFileError) as caught:
        patch.setattr(os, "fstat", Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
        reader.check()
    assert str(caught.value).startswith(f"{tmp_path}/a.bin: cannot be looked at any more (Stale file handle): bring")


def test_a_read_that_stalls_is_named(reader, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(loader, "STALL_SEC", 0.2)
    loader._watched.cache_clear()  # its thread is a new one
    preadv(monkeypatch, lambda call: time.sleep(1.0) if call == 1 else None)
    with caplog.at_level(logging.WARNING):
        assert read(reader) == IDS[100:2100].tolist()
    named = [record.getMessage().rpartition(" for ")[0] for record in caplog.records]
    assert set(named) == {f"{tmp_path}/a.bin: a read at byte 200 has not returned"}
    assert 1 <= len(named) <= 6, "0.2, 0.4 and 0.8 s; and an earlier test's thread may do the same"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_cut_off_ends_a_training_with_its_name(here, monkeypatch, capsys, workers):
    """A memory map ended the process with SIGBUS. ``test_saving.py`` covers other errors of workers."""
    after_step(monkeypatch, 1, lambda: os.truncate(here / "train.bin", 32))
    assert train_here(command_line(here, max_train_steps=30, num_workers=workers)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {here}/train.bin: changed on disk while it is read, at byte ")
    assert line.endswith("(has 32 bytes now, not 1,282): bring the file that the run began with back, and --resume")
