"""Operators that DeepSpeed compiles, and the table of its known faults."""

import ast
import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from messages import without_paths
from small_run import REPOSITORY
from strategy_cells import NO_LIBAIO

from dsgpt.common.errors import UserError
from dsgpt.strategies.deepspeed import setup as compiled_ops
from dsgpt.strategies.deepspeed.setup import load_ops

# DeepSpeed's compiled parts: loaded if they are complete, built again if a killed build left something.


LOAD_AND_LOOK = """
import ctypes
from dsgpt.strategies.deepspeed import setup as compiled_ops

compiled_ops.load_ops("AsyncIOBuilder")
assert ctypes.CDLL(None).deepspeed_pin_tensor_mgr_holder
"""
"""Asynchronous I/O is linked against the library of pinned memory, whose symbols must be global."""


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
    compilation = Compilation(compiled_ops.ops_folder())
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
def test_what_a_killed_build_left_is_built_again(compilation, library):
    """PyTorch would wait until the marker is removed, which nothing does."""
    place = compilation.folder / "part"
    place.mkdir(parents=True)
    (place / "lock").touch()
    if library:
        (place / "part.so").write_bytes(b"half a library")
    load_ops("PartBuilder")
    assert compilation.found == [{"marker": False, "root": str(compilation.folder)}]


def test_the_compilers_that_a_killed_process_left_are_ended(compilation):
    """Two builds in one folder would write the same files. Other processes there, as a user's shell, go on."""
    (compilation.folder / "part").mkdir(parents=True)
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(compilation.folder)}
    left, shell = (
        subprocess.Popen(["sleep", "600"], cwd=compilation.folder / "part", env=variables)
        for variables in (environment, os.environ)
    )
    try:
        load_ops("PartBuilder")
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
    monkeypatch.setattr(compiled_ops, "_loaded", lambda builder, library: loaded.append(library.name))
    return loaded


def test_a_complete_library_is_loaded_from_a_read_only_folder(compilation, complete):
    """An administrator may fill the folder for all users. The test may run as root, whom permissions do not stop."""
    (compilation.folder / ".dsgpt-lock").mkdir()  # a folder cannot be opened for writing
    load_ops("PartBuilder")
    assert complete == ["part.so"]
    assert compilation.found == []


def test_a_missing_library_in_a_read_only_folder_is_an_error(compilation):
    (compilation.folder / ".dsgpt-lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"compiled code cannot be stored there \(Is a directory\)"):
        load_ops("PartBuilder")


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
    assert without_paths("\n".join(caught.value.problems), compiled_ops.ops_folder()) == snapshot


@pytest.mark.skipif(NO_LIBAIO or not shutil.which("ninja"), reason="needs g++, ninja and libaio-dev")
def test_the_real_ones_are_linked_with_each_other():
    """The first process compiles them, unless an earlier run with nvme did; the second only loads them."""
    command, variables = [sys.executable, "-c", LOAD_AND_LOOK], {**os.environ, "DS_ACCELERATOR": "cpu"}
    for first in (True, False):
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        assert done.returncode == 0, done.stderr
        assert first or "compiling" not in done.stderr


# The table of DeepSpeed's faults in `docs/ARCHITECTURE.md` names files and functions that exist.


PACKAGE = REPOSITORY / "src" / "dsgpt"
PAGE = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("## What DeepSpeed 0.19.8 gets wrong") :]
PLACES = sorted(set(re.findall(r"`([\w/]+\.py)(?:: (\w+))?`", TABLE)))


def test_the_table_is_found():
    assert len(PLACES) > 12


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_a_work_around_is_where_the_table_says(file, name):
    """A file without a folder is one of ``strategies/deepspeed``."""
    path = PACKAGE / file if "/" in file else PACKAGE / "strategies" / "deepspeed" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not name or name in functions
