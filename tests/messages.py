"""Messages made comparable, for tests that compare them with snapshots."""

from pathlib import Path

from dsgpt.common.text import BUSY
from dsgpt.record.provenance import PARAGRAPH


def without_paths(text: str, folder: Path) -> str:
    """``text`` with the word FOLDER in place of the path ``folder``, which differs in every run of a test."""
    return text.replace(str(folder), "FOLDER")


def without_sources(page: str) -> str:
    """``page`` without what is written beside its text: the paragraphs about sources and about a busy machine."""
    return "\n\n".join(part for part in page.split("\n\n") if not part.startswith((PARAGRAPH, BUSY)))
