"""Messages made comparable, for tests that compare them with snapshots."""

from pathlib import Path


def without_paths(text: str, folder: Path) -> str:
    """``text`` with the word FOLDER in place of the path ``folder``, which differs in every run of a test."""
    return text.replace(str(folder), "FOLDER")
