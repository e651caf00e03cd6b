"""Offload to nvme leaves no file on the drive, and changes no file of another run."""

import errno
import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from messages import without_paths

from dsgpt.common.errors import UserError
from dsgpt.machine.topology import Topology
from dsgpt.strategies.deepspeed import setup as swap_space
from dsgpt.strategies.deepspeed.setup import SwapSpace

MAIN = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="deepspeed")
HOLD = """
import sys
from pathlib import Path
from dsgpt.strategies.deepspeed.setup import _make

_make(Path(sys.argv[1]))
Path(sys.argv[1], "moments").write_bytes(b"...")
print("made", flush=True)
sys.stdin.read()
"""


def space(base: Path, topology: Topology = MAIN, **paths: Path) -> tuple[SwapSpace, dict[str, Any]]:
    """The swap space of a new run with both offloads under ``base``, and the paths that DeepSpeed gets."""
    names = ("offload_optimizer", "offload_param")
    config = {"zero_optimization": {name: {"nvme_path": str(paths.get(name, base))} for name in names}}
    recipe: Any = SimpleNamespace(nvme_blocks=names)
    return SwapSpace(config, recipe, topology), {name: config["zero_optimization"][name]["nvme_path"] for name in names}


def open_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_run_has_its_folder_and_removes_it(tmp_path):
    one, its_paths = space(tmp_path)
    two, other_paths = space(tmp_path)
    assert len(set(its_paths.values())) == 1
    assert its_paths["offload_param"] != other_paths["offload_param"]
    for path in (its_paths["offload_param"], other_paths["offload_param"]):
        assert Path(path).parent == tmp_path
        (Path(path) / "moments").write_bytes(b"...")
    one.close()
    one.close()
    assert [str(path) for path in tmp_path.iterdir()] == [other_paths["offload_param"]]
    assert (Path(other_paths["offload_param"]) / "moments").exists()
    two.close()
    assert list(tmp_path.iterdir()) == []


def test_each_offload_may_use_another_drive(tmp_path):
    swap, paths = space(tmp_path / "one", offload_param=tmp_path / "two")
    assert {Path(path).parent for path in paths.values()} == {tmp_path / "one", tmp_path / "two"}
    swap.close()
    assert [list(path.iterdir()) for path in tmp_path.iterdir()] == [[], []]


def test_other_ranks_of_a_machine_make_nothing(tmp_path):
    swap, _ = space(tmp_path, replace(MAIN, rank=1, local_rank=1))
    assert list(tmp_path.iterdir()) == []
    swap.close()


def test_ranks_of_other_machines_have_other_folders(tmp_path, monkeypatch):
    """The machines may share the drive, and agree on one name for the run."""
    monkeypatch.setattr(swap_space, "from_main", lambda value: "agreed")
    names = [space(tmp_path, replace(MAIN, rank=rank, local_rank=rank % 2))[1]["offload_param"] for rank in range(4)]
    assert names[0] == names[1] != names[2] == names[3]


def test_the_next_run_removes_what_a_killed_run_left(tmp_path):
    """A real process holds the folder, and is then killed."""
    left = tmp_path / f"{swap_space._own_prefix()}12345678-0"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(left)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "made\n"
    swap, _ = space(tmp_path)
    swap.close()
    assert (left / "moments").exists()
    holder.kill()
    holder.communicate()
    swap, _ = space(tmp_path)
    assert not left.exists()
    swap.close()


def test_files_of_others_stay(tmp_path):
    """A file, a link to another folder, and what another host left or still uses: its locks may be invisible here."""
    mine, theirs = f"{swap_space._own_prefix()}mine", "nvme-swap-another-host.12345678-0"
    (tmp_path / mine).write_text("a file")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kept").touch()
    (tmp_path / f"{mine}-link").symlink_to(tmp_path / "data")
    (tmp_path / theirs).mkdir()
    handles = open_handles()
    swap, _ = space(tmp_path)
    swap.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", theirs, mine, f"{mine}-link"]
    assert (tmp_path / "data" / "kept").exists()
    assert open_handles() == handles


def test_a_leftover_that_cannot_be_removed_does_not_matter(tmp_path, monkeypatch):
    """Another user's, or one that another run removes at the same time."""
    left = tmp_path / f"{swap_space._own_prefix()}12345678-0"
    (left / "below").mkdir(parents=True)

    def denied(path: str, *given: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", denied)
        handles = open_handles()
        swap, _ = space(tmp_path)
        assert open_handles() == handles + 1
    swap.close()
    assert left.exists()


def test_an_error_without_a_file_name_names_the_folder(tmp_path, monkeypatch, snapshot):
    def no_locks(handle: int, kind: int) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    handles = open_handles()
    with pytest.raises(UserError) as caught:
        space(tmp_path)
    assert without_paths("\n".join(caught.value.problems), tmp_path) == snapshot
    assert list(tmp_path.iterdir()) == []
    assert open_handles() == handles


def test_a_path_that_cannot_be_used_gives_one_error_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        space(tmp_path, offload_param=tmp_path / "file" / "below")
    (line,) = caught.value.problems
    assert line.startswith(f"nvme_path {tmp_path / 'file'}")
    assert line.endswith("cannot be used (Not a directory): name another folder")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_never_seen_without_its_lock(tmp_path, monkeypatch):
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        handle = os.open(self, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    swap, _ = space(tmp_path)
    swap.close()
