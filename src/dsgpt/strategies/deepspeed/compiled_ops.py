"""DeepSpeed's extensions in C++, compiled at first use, by one process at a time.

PyTorch marks a build in progress with a file. A killed process leaves this file behind, and every later process that
needs the extension waits for it forever. Here extensions are built in separate folders, under a lock that the operating
system releases when the process ends. So the process that holds the lock knows that such a file is left over, and
removes it.

A folder is for one instruction set and one version each of Python, PyTorch and DeepSpeed. So a complete library in it
is loaded without DeepSpeed's check of what to compile for, which takes seconds in every process. The folder may then be
read-only.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.cpp_extension import get_default_build_root

from dsgpt.common.errors import UserError
from dsgpt.common.locks import Lock
from dsgpt.runtime.machine_probe import compiler

_ROOT = "TORCH_EXTENSIONS_DIR"


def load_ops(*builders: str) -> None:
    """Load the extensions of DeepSpeed's ``builders``, and compile those that are missing; DeepSpeed finds them loaded.

    Args:
        builders: names of classes of ``deepspeed.ops.op_builder``.

    Raises:
        UserError: one is missing, and the folder for compiled code cannot be written.
    """
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - only DeepSpeed's strategies import it

    folder = ops_folder()
    try:
        with _extensions_in(folder), _only_missing_compiled(folder):
            for name in builders:
                get_accelerator().create_op_builder(name).load(verbose=False)
    except OSError as error:
        raise UserError(
            f"{folder}: compiled code cannot be stored there ({error.strerror}): name another folder in {_ROOT}"
        ) from error


@contextlib.contextmanager
def _only_missing_compiled(folder: Path) -> Iterator[None]:
    """Make DeepSpeed's builders, which load each other, compile only what is missing in ``folder``."""
    from deepspeed.ops.op_builder.builder import OpBuilder  # noqa: PLC0415

    compile_and_load = OpBuilder.jit_load
    lock = contextlib.ExitStack()  # holds the lock from the first compilation to the last
    locked: list[bool] = []

    def jit_load(builder: Any, verbose: bool = False) -> Any:
        """Load a library that is complete, else compile it, one process at a time."""
        library, marker = folder / builder.name / f"{builder.name}.so", folder / builder.name / "lock"
        if _is_complete(library, marker):
            return _loaded(builder, library)
        if not locked:
            lock.enter_context(_locked(folder))
            locked.append(True)
            if _is_complete(library, marker):  # compiled by the process that had the lock
                return _loaded(builder, library)
        marker.unlink(missing_ok=True)
        if "CXX" not in os.environ and not shutil.which("c++") and (found := compiler()):
            os.environ["CXX"] = shlex.join(found)  # PyTorch looks only for c++
        line = f"compiling DeepSpeed's {builder.name}, once on this machine: this takes minutes"
        print(line, file=sys.stderr, flush=True)
        return compile_and_load(builder, verbose)

    OpBuilder.jit_load = jit_load
    try:
        with lock:
            yield
    finally:
        OpBuilder.jit_load = compile_and_load


def _is_complete(library: Path, marker: Path) -> bool:
    """Whether PyTorch has finished the library: its marker is there during a build, and stays after a kill."""
    return not marker.exists() and library.exists()


def _loaded(builder: Any, library: Path) -> ModuleType:
    """Load ``library``, and register it where DeepSpeed looks for the extension of ``builder``."""
    spec = importlib.util.spec_from_file_location(builder.name, library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library}: no loader for a library of this name")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    type(builder)._loaded_ops[builder.name] = module  # the one dictionary of all builders
    return module


def ops_folder() -> Path:
    """The folder for this machine, below the one that PyTorch or the user chose, which different machines may share."""
    root = Path(os.environ.get(_ROOT) or get_default_build_root())
    python = f"py{sys.version_info.major}{sys.version_info.minor}-{_processor()}"
    return root / f"dsgpt-{python}-torch-{torch.__version__}-deepspeed-{version('deepspeed')}"


def _processor() -> str:
    """A short name for the processor's instruction set: DeepSpeed compiles for this processor only."""
    facts = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        facts = next((line for line in lines if line.startswith(("flags", "Features"))), facts)
    return f"{platform.machine()}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with Lock.of_file(folder / ".dsgpt-lock") as lock:
        lock.take(wait=True)
        yield


@contextlib.contextmanager
def _extensions_in(folder: Path) -> Iterator[None]:
    before = os.environ.get(_ROOT)
    os.environ[_ROOT] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ROOT]
        else:
            os.environ[_ROOT] = before
