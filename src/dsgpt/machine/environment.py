"""The software and the machine behind a run."""

import platform
import socket
from importlib.metadata import PackageNotFoundError, version

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
