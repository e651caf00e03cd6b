"""Prepare messages for a comparison with a snapshot."""

from pathlib import Path


def without_paths(text: str, folder: Path) -> str:
    """``text`` with the word FOLDER in the place of ``folder``, which every test run names differently."""
    return text.replace(str(folder), "FOLDER")
