"""Messages made comparable, for tests that compare them with snapshots."""

import re
from pathlib import Path

_OF_TORCH = re.compile(r"^[IWE]\d{4} .*\n", flags=re.MULTILINE)


def without_torch(text: str) -> str:
    """``text`` without lines that torch logs, for example where it is built for CUDA and finds no driver."""
    return _OF_TORCH.sub("", text)


def without_paths(text: str, folder: Path) -> str:
    """``text`` with the word FOLDER in place of the path ``folder``, which differs in every run of a test."""
    return text.replace(str(folder), "FOLDER")
