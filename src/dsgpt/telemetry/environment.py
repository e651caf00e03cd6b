"""The software and the code revision behind a run."""

import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def software_versions() -> dict[str, str | None]:
    """The ``env`` block of a record; None for a package that is not installed."""
    return {
        "python_version": platform.python_version(),
        "torch_version": torch.__version__,
        "transformers_version": _version("transformers"),
        "deepspeed_version": _version("deepspeed"),
        "cuda_version": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def host_name() -> str:
    """This machine's name."""
    return socket.gethostname()


def git_commit() -> str | None:
    """The commit of this code, followed by ``-dirty`` if files differ from it; None outside a git checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
