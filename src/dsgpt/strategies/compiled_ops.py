"""DeepSpeed's parts in C++, compiled at first use, by one process at a time.

PyTorch marks a build in progress by a file, which a killed process leaves behind: everybody who needs the same part
waits for it for ever after. Here parts are built in folders of our own under a lock that the system frees with the
process, so that such a file is known to be a leftover and is removed.
"""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.cpp_extension import get_default_build_root

from dsgpt.errors import UserError

_ROOT = "TORCH_EXTENSIONS_DIR"


def load_ops(*builders: str) -> None:
    """Load what DeepSpeed's ``builders`` make, compiling it where it is missing; DeepSpeed finds it loaded later.

    Args:
        builders: names of classes of ``deepspeed.ops.op_builder``.

    Raises:
        UserError: the folder for compiled code cannot be written.
    """
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415 - DeepSpeed's strategies alone import it

    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / ".dsgpt-lock"), _built_in(folder):
            for name in builders:
                builder = get_accelerator().create_op_builder(name)
                (folder / builder.name / "lock").unlink(missing_ok=True)
                builder.load(verbose=False)
    except OSError as error:
        raise UserError(
            f"{folder}: compiled code cannot be kept there ({error.strerror}): name another folder in {_ROOT}"
        ) from error


def _folder() -> Path:
    """One for each pair of versions, under the folder that PyTorch or the user chose."""
    import deepspeed  # noqa: PLC0415

    root = Path(os.environ.get(_ROOT) or get_default_build_root())
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return root / f"dsgpt-{python}-torch-{torch.__version__}-deepspeed-{deepspeed.__version__}"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _built_in(folder: Path) -> Iterator[None]:
    before = os.environ.get(_ROOT)
    os.environ[_ROOT] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ROOT]
        else:
            os.environ[_ROOT] = before
