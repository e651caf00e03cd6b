"""Locks between processes. The tests that kill runs also test that the system frees the lock of a killed process."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from dsgpt.common.files import Lock, NoLocksError


def test_a_lock_has_one_holder_until_it_is_released(tmp_path: Path):
    with Lock.of_file(tmp_path / "lock") as first, Lock.of_file(tmp_path / "lock") as second:
        assert first.take() and not second.take()
        first.release()
        assert second.take(wait=True)
    with Lock.of_file(tmp_path / "lock") as third:
        assert third.take()
    assert (tmp_path / "lock").exists()


def test_a_shared_lock_excludes_only_exclusive_ones(tmp_path: Path):
    with Lock.of_folder(tmp_path) as first, Lock.of_folder(tmp_path) as second, Lock.of_folder(tmp_path) as third:
        assert first.take(shared=True) and second.take(shared=True) and not third.take()


def test_links_are_followed_only_on_request(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    for link, target in (("file-link", "file"), ("folder-link", "folder")):
        (tmp_path / link).symlink_to(tmp_path / target)
    with pytest.raises(OSError) as refused:
        Lock.of_file(tmp_path / "file-link")
    assert refused.value.errno == errno.ELOOP
    assert not (tmp_path / "file").exists()
    with pytest.raises(NotADirectoryError):
        Lock.of_folder(tmp_path / "folder-link")
    with Lock.of_folder(tmp_path / "folder-link", follow_link=True) as lock:
        assert lock.take()


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOLCK, NoLocksError), (errno.EIO, OSError)])
def test_missing_locks_and_failing_ones_raise_different_errors(tmp_path: Path, monkeypatch, number, kind):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Lock.of_file(tmp_path / "lock") as lock, pytest.raises(OSError) as refused:
        lock.take()
    assert (type(refused.value), refused.value.errno) == (kind, number)
