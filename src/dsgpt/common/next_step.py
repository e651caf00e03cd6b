"""The last line of a long command: the command to run next, as it can be pasted into the shell that ran this one."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def script_words(script: str, *words: object) -> list[str]:
    """The words that run ``script``, a path in the repository, with this interpreter from the current folder."""
    return [sys.executable, str(REPOSITORY / script), *map(str, words)]


def next_line(words: Sequence[object]) -> str:
    """``next: .venv/bin/python src/generate.py --checkpoint checkpoint/run``, quoted for a shell.

    Absolute paths below the current folder are written from there. None is resolved: the interpreter of an environment
    is a link.
    """
    here = Path.cwd()
    paths = [Path(str(word)) for word in words]
    inside = [path.is_absolute() and path.is_relative_to(here) for path in paths]
    short = [path.relative_to(here) if below else word for path, below, word in zip(paths, inside, words, strict=True)]
    return f"next: {shlex.join(map(str, short))}"
