"""Whether the files that a record was made from have changed since: git compares them with the commit of the record.

Imports no torch.
"""

import hashlib
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

DIRTY = "-dirty"
"""Follows the commit of a record if files differed from that commit when it was made."""
PARAGRAPH = "Sources: "
"""The beginning of a page's paragraph about the sources of its record."""
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_DIGITS, _NAMES = 12, 5
"""Digits of a commit, and number of files, that a text shows."""
_TRAINING = ("src/gpt2.py", "data_prep/preprocess.py", "ds_configs/*.json", "requirements.txt", "src/dsgpt/*.py")
_AROUND = ("benchmarks", "charts", "dashboard", "demo.py", "inference/server")


@dataclass(frozen=True, kw_only=True)
class SourceChanges:
    """Changes of the sources of a record since its commit."""

    commit: str = ""
    """First digits of the commit."""
    unknown: str = ""
    """Reason why the changes are not known; empty if they are."""
    changed: Sequence[str] = ()
    """Files that differ, are gone or are new, sorted."""
    total: int = 0
    """Number of files, those of the commit and the present ones together."""
    moved: bool = False
    """Most files of the commit do not exist any more."""

    def line(self) -> str:
        """Why the record is not up to date, in a few words; empty if it is."""
        if self.unknown:
            return f"not known ({self.unknown})"
        if self.moved:
            return f"made before the code moved, at {self.commit}"
        return f"{len(self.changed)} of {self.total} sources changed since {self.commit}" if self.changed else ""

    def paragraph(self) -> str:
        """Paragraph about the sources, for the page of the record."""
        if self.unknown or self.moved:
            return f"{PARAGRAPH}{self.line()}."
        made = f"{PARAGRAPH}the record was made at commit `{self.commit}`"
        if not self.changed:
            return f"{made}, and was up to date when this page was made."
        more = f" and {len(self.changed) - _NAMES} more" if len(self.changed) > _NAMES else ""
        count = f"{len(self.changed)} of {self.total} sources had changed"
        return f"{made}. When this page was made,\n{count}: {', '.join(self.changed[:_NAMES])}{more}."


def training_sources(*, measured: Collection[str] = ()) -> list[str]:
    """Pathspecs of the files that make text, recipes and trainings, and of ``measured``: rooms or files of ``_AROUND``.

    The ``*`` of a pathspec matches ``/``, too.
    """
    return [*_TRAINING, *(f":(exclude)src/dsgpt/{room}" for room in _AROUND if room not in measured)]


def changes_since(commit: object, sources: Sequence[str], *, repository: Path) -> SourceChanges:
    """Changes of ``sources`` since ``commit``.

    Args:
        commit: what a record has as its ``git_commit``.
        sources: pathspecs. Files that git does not track count, too, unless it ignores them.
        repository: the folder that the pathspecs are relative to.
    """
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit.removesuffix(DIRTY)):
        return SourceChanges(unknown="no commit is named")
    short = commit[:_DIGITS]
    if commit.endswith(DIRTY):
        return SourceChanges(unknown=f"{short}: files that were not committed took part")
    try:
        _git(repository, "cat-file", "-e", commit)
        diff = _names(repository, "diff", "--no-renames", "--name-status", "--relative", commit, "--", *sources)
        untracked = set(_names(repository, "ls-files", "--others", "--exclude-standard", "--", *sources))
        tracked = set(_names(repository, "ls-files", f"--with-tree={commit}", "--", *sources))
    except _UnknownError as error:
        return SourceChanges(unknown=f"{short}: {error}")
    if not tracked:  # an installed package below the checkout of another project
        return SourceChanges(unknown=f"{short}: git does not have these files")
    states = dict(zip(diff[1::2], diff[::2], strict=True))
    new = untracked | {name for name, state in states.items() if state == "A"}
    gone = {name for name, state in states.items() if state == "D"} - untracked
    return SourceChanges(
        commit=short,
        changed=sorted(states.keys() | untracked),
        total=len(tracked | untracked),
        moved=2 * len(gone) > len(tracked - new),
    )


def git_commit(repository: Path = Path(__file__).parent, *, mark: str = DIRTY) -> str | None:
    """The commit of this code, followed by ``mark`` if tracked files differ from it; None outside a git checkout."""
    try:
        return _git(repository, "describe", "--always", "--abbrev=40", f"--dirty={mark}", "--exclude=*").strip()
    except _UnknownError:
        return None


def sources_sha256() -> str:
    """Hash of all Python files of this package: equal where the same code runs, whether git knows it or not."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def marked(commit: str | None, sources: Sequence[str], *, repository: Path) -> str | None:
    """``commit``, followed by ``DIRTY`` if ``sources`` differ from it."""
    return f"{commit}{DIRTY}" if changes_since(commit, sources, repository=repository).changed else commit


class _UnknownError(Exception):
    """Git cannot tell; the message says why."""


def _names(repository: Path, command: str, *words: str) -> list[str]:
    """Fields of the output of a git command with ``-z``."""
    return _git(repository, command, "-z", *words).split("\0")[:-1]


def _git(repository: Path, *words: str) -> str:
    """Output of a git command, which takes no locks.

    Raises:
        _UnknownError: it fails, or cannot be started.
    """
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, errors="replace", check=True)
    except OSError:
        raise _UnknownError("git cannot be started") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.partition("\n")[0].removeprefix("fatal: ")
        # ``cat-file -e`` prints nothing for an object that is not there
        raise _UnknownError(f"git says: {said}" if said else "this clone does not have that commit") from None
    return done.stdout
