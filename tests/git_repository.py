"""Small git repositories for tests of what records say about their sources."""

import os
import subprocess
from pathlib import Path

QUIET = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    **{"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
    **{f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}
"""An environment without the settings of this machine."""


def git(folder: Path, *words: str) -> str:
    """What git prints in ``folder``."""
    return subprocess.run(
        ["git", *words], cwd=folder, env=QUIET, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit_all(folder: Path) -> str:
    """Commit everything in ``folder``, which becomes a repository if it is none; return the commit."""
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "some")
    return commit_of(folder)


def commit_of(folder: Path) -> str:
    """The commit that is checked out."""
    return git(folder, "rev-parse", "HEAD")


def write(folder: Path, *names: str, text: str = "") -> None:
    """Write files with different contents, which begin with ``text``."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}# {name}\n")
