"""What DeepSpeed needs outside of an engine: compiled operators, and folders on a drive."""

import errno
import fcntl
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from small_run import without_paths

from dsgpt.common.errors import UserError
from dsgpt.machine.topology import Topology
from dsgpt.strategies.deepspeed import setup
from dsgpt.strategies.deepspeed.setup import SwapSpace, load_ops

# DeepSpeed's compiled parts: loaded if they are complete, built again if a killed build left something.


class Compilation:
    """Replaces a compilation, which takes minutes: notes what it finds when it is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[dict[str, object]] = []

    def __call__(self, builder: object, verbose: bool) -> None:
        marker = self.folder / "part" / "lock"
        with (self.folder / ".dsgpt-lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.found.append({"marker": marker.exists(), "root": os.environ["TORCH_EXTENSIONS_DIR"]})


@pytest.fixture
def compilation(tmp_path, monkeypatch):
    """What is called instead of a compiler for a part that DeepSpeed does not have, kept under ``tmp_path``."""
    import deepspeed.accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder

    class PartBuilder(OpBuilder):
        def __init__(self) -> None:
            super().__init__("part")

        def absolute_name(self) -> str:
            return "deepspeed.ops.part"

        def sources(self) -> list[str]:
            return []

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    compilation = Compilation(setup.ops_folder())
    monkeypatch.setattr(OpBuilder, "jit_load", compilation)
    accelerator = SimpleNamespace(create_op_builder=lambda name: PartBuilder())
    monkeypatch.setattr(deepspeed.accelerator, "get_accelerator", lambda: accelerator)
    return compilation


def test_a_part_is_built_alone_in_a_folder_for_this_machine(compilation, tmp_path, capsys):
    load_ops("PartBuilder")
    assert compilation.found == [{"marker": False, "root": str(compilation.folder)}]
    assert compilation.folder.parent == tmp_path
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path)
    assert "compiling DeepSpeed's part, once on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("library", [False, True])
def test_what_a_killed_build_left_is_built_again_and_its_compilers_are_ended(compilation, library):
    """PyTorch would wait until the marker is removed, which nothing does. Two builds would write the same files.

    Other processes there, as a user's shell, go on.
    """
    place = compilation.folder / "part"
    place.mkdir(parents=True)
    (place / "lock").touch()
    if library:
        (place / "part.so").write_bytes(b"half a library")
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(compilation.folder)}
    left, shell = (
        subprocess.Popen(["sleep", "600"], cwd=place, env=variables) for variables in (environment, os.environ)
    )
    try:
        load_ops("PartBuilder")
        assert compilation.found == [{"marker": False, "root": str(compilation.folder)}]
        assert left.poll() is not None
        assert shell.poll() is None
    finally:
        for process in (left, shell):
            process.kill()
            process.wait()


@pytest.fixture
def complete(compilation, monkeypatch) -> list[str]:
    """Makes a complete library; the names of the libraries that are loaded."""
    place = compilation.folder / "part"
    place.mkdir(parents=True)
    (place / "part.so").write_bytes(b"a library")
    loaded: list[str] = []

    def load(_builder: object, library: Path) -> ModuleType:
        loaded.append(library.name)
        return ModuleType(library.stem)

    monkeypatch.setattr(setup, "_loaded", load)
    return loaded


def test_a_complete_library_is_loaded_from_a_read_only_folder(compilation, complete):
    """An administrator may fill the folder for all users. The test may run as root, whom permissions do not stop."""
    (compilation.folder / ".dsgpt-lock").mkdir()  # a folder cannot be opened for writing
    load_ops("PartBuilder")
    assert complete == ["part.so"]
    assert compilation.found == []


def test_a_library_that_another_process_completed_meanwhile_is_not_built_again(compilation, complete, monkeypatch):
    marker, original = compilation.folder / "part" / "lock", fcntl.flock
    marker.touch()

    def wait(file: object, kind: int) -> None:
        original(file, kind)
        marker.unlink()

    monkeypatch.setattr(fcntl, "flock", wait)
    load_ops("PartBuilder")
    assert complete == ["part.so"]
    assert compilation.found == []


def test_a_folder_that_cannot_be_made_is_an_error(compilation, monkeypatch, tmp_path, snapshot):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError) as caught:
        load_ops("PartBuilder")
    assert without_paths("\n".join(caught.value.problems), setup.ops_folder()) == snapshot


# Offload to nvme leaves no file on the drive, and changes no file of another run.


MAIN = Topology(rank=0, local_rank=0, world_size=2, local_world_size=2, launcher="deepspeed")
HOLD = """
import sys
from pathlib import Path
from dsgpt.common.files import Lock

lock = Lock.of_folder(Path(sys.argv[1]))
print(lock.take(shared=True), flush=True)
sys.stdin.read()
"""
"""As a run holds its folder, without its imports."""


def space(base: Path, topology: Topology = MAIN, **paths: Path) -> tuple[SwapSpace, dict[str, Any]]:
    """The swap space of a new run with both offloads under ``base``, and the paths that DeepSpeed gets."""
    names = ("offload_optimizer", "offload_param")
    config = {"zero_optimization": {name: {"nvme_path": str(paths.get(name, base))} for name in names}}
    recipe: Any = SimpleNamespace(nvme_blocks=names)
    return SwapSpace(config, recipe, topology), {name: config["zero_optimization"][name]["nvme_path"] for name in names}


def open_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_run_has_its_folders_and_removes_them(tmp_path):
    """Each offload may use another drive. Other ranks of a machine make nothing."""
    one, its_paths = space(tmp_path / "one", offload_param=tmp_path / "two")
    two, other_paths = space(tmp_path / "one")
    space(tmp_path / "one", replace(MAIN, rank=1, local_rank=1))[0].close()
    assert [Path(path).parent.name for path in its_paths.values()] == ["one", "two"]
    assert len({*its_paths.values(), *other_paths.values()}) == 3
    for path in (*its_paths.values(), *other_paths.values()):
        (Path(path) / "moments").write_bytes(b"...")
    one.close()
    one.close()
    assert [str(path) for path in tmp_path.glob("*/*")] == [other_paths["offload_param"]]
    assert (Path(other_paths["offload_param"]) / "moments").exists()
    two.close()
    assert list(tmp_path.glob("*/*")) == []


def test_ranks_of_other_machines_have_other_folders(tmp_path, monkeypatch):
    """The machines may share the drive, and agree on one name for the run."""
    monkeypatch.setattr(setup, "from_main", lambda value: "agreed")
    names = [space(tmp_path, replace(MAIN, rank=rank, local_rank=rank % 2))[1]["offload_param"] for rank in range(4)]
    assert names[0] == names[1] != names[2] == names[3]


def test_the_next_run_removes_what_a_killed_run_left(tmp_path):
    """A real process holds the folder, and is then killed."""
    left = tmp_path / f"{setup._own_prefix()}12345678-0"
    left.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(left)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "True\n"
    swap, _ = space(tmp_path)
    swap.close()
    assert left.exists()
    holder.kill()
    holder.communicate()
    swap, _ = space(tmp_path)
    assert not left.exists()
    swap.close()


def test_files_of_others_stay(tmp_path, monkeypatch):
    """A file, a link, what another host left or still uses, as its locks may be invisible here, and another user's."""
    mine, theirs = f"{setup._own_prefix()}mine", "nvme-swap-another-host.12345678-0"
    (tmp_path / mine).write_text("a file")
    for folder in ("data/kept", theirs, f"{mine}-another-user/below"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / f"{mine}-link").symlink_to(tmp_path / "data")
    before, handles = sorted(tmp_path.rglob("*")), open_handles()

    def denied(path: str, *given: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", denied)
        swap, _ = space(tmp_path)
    swap.close()
    assert sorted(tmp_path.rglob("*")) == before
    assert open_handles() == handles


def test_a_path_that_cannot_be_used_gives_one_error_line(tmp_path, monkeypatch, snapshot):
    """Of an error without a file name, the line names the folder."""
    (tmp_path / "file").touch()
    handles, problems = open_handles(), []
    for path in (tmp_path / "file" / "below", tmp_path):
        with pytest.raises(UserError) as caught:
            space(tmp_path, offload_param=path)
        problems.append(without_paths("\n".join(caught.value.problems), tmp_path))
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("no locks")))
    assert problems == snapshot
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert open_handles() == handles


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
