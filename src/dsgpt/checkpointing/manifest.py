"""``manifest.json``: the settings that made a checkpoint, and the size and sha256 of every file in it.

A file of a checkpoint is verified against the manifest before it is read. Files that the manifest does not name are
never read.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from dsgpt.common.errors import UserError
from dsgpt.common.files import link_between, sha256_of
from dsgpt.common.json_files import Count, Finite, JsonError, Positive, Sha256, clipped, read_as

MANIFEST = "manifest.json"
_A_LINK = "is a link, and links in a checkpoint are not followed (cp -rL makes a copy without links)"

_LONGEST_NAME = 255
"""Bytes: the limit of file systems for one name; no path in a checkpoint is that long."""


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if "\0" in name or not path.parts:
        raise ValueError(f"{name!r} is not the name of a file")
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name} is outside of the checkpoint")
    if len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{clipped(name)} is longer than any file system allows")
    return name


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Size and hash that a file must have."""

    size: Count
    """Bytes."""
    sha256: Sha256


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that wrote the checkpoint."""

    world_size: Positive
    sizes: dict[str, Positive]
    """The fields of ``topology.ParallelSizes``."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of ``manifest.json``; a folder of weights alone lacks the fields that only a resume needs."""

    files: Annotated[dict[Annotated[str, AfterValidator(_inside)], FileFacts], Field(min_length=1)]
    """By path inside the checkpoint, with forward slashes."""
    step: Count | None = None
    val_loss: Finite | None = None
    """The validation loss of exactly these weights; None where no validation ran at this step."""
    strategy: str | None = None
    run_id: str | None = None
    topology: Ranks | None = None
    device: str | None = None
    """``cpu`` or ``cuda``."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """The settings that a resumed run must match, by the names of ``training.run_description.settings_to_match``."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(facts.size for facts in self.files.values())


def parse_manifest(checkpoint: Path) -> Manifest:
    """The manifest; no file is verified.

    Raises:
        UserError: it cannot be read, or is not a manifest.
    """
    path = checkpoint / MANIFEST
    try:
        if path.is_symlink():
            raise UserError(f"{path}: {_A_LINK}")
        if not path.is_file():
            raise UserError(f"{path}: is missing: the checkpoint is incomplete")
        return read_as(path, Manifest, unknown_keys=True)
    except JsonError as error:
        raise UserError(f"{path}: is not a readable manifest ({error})") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def read_manifest(
    checkpoint: Path,
    *,
    only: Callable[[str], bool] = lambda _: True,
    progress: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """The manifest, after the size and hash of every file that it names were verified.

    Args:
        checkpoint: the folder.
        only: whether to verify a file, by its name in the manifest.
        progress: called with the bytes read since its last call.

    Raises:
        UserError: a file is missing, of another size, or damaged; the message names it.
    """
    manifest = parse_manifest(checkpoint)
    for name, facts in manifest.files.items():
        if only(name):
            _verify(checkpoint, name, facts, progress)
    return manifest


def _verify(checkpoint: Path, name: str, facts: FileFacts, progress: Callable[[int], None]) -> None:
    file = checkpoint / name
    try:
        if link := link_between(checkpoint, file):
            raise UserError(f"{link}: is damaged: it {_A_LINK}")
        if file.exists() and not file.is_file():  # opening a pipe would wait for its writer
            raise UserError(f"{file}: is damaged: it is not a file")
        size = file.stat().st_size
        same = size == facts.size and sha256_of(file, progress) == facts.sha256
    except FileNotFoundError as error:
        raise UserError(f"{file}: is damaged: it is missing") from error
    except OSError as error:
        raise UserError(f"{file}: is damaged: it cannot be read ({error.strerror})") from error
    if size != facts.size:
        raise UserError(f"{file}: is damaged: it has {size:,} bytes instead of {facts.size:,}")
    if not same:
        raise UserError(f"{file}: is damaged: its sha256 differs from that in {MANIFEST}")


def require_files(checkpoint: Path, manifest: Manifest, names: Collection[str]) -> None:
    """Check that the manifest names all of ``names``.

    Raises:
        UserError: it lacks some, which therefore cannot be verified.
    """
    missing = [name for name in names if name not in manifest.files]
    if missing:
        raise UserError(f"{checkpoint / MANIFEST}: does not name {' and '.join(missing)}: the checkpoint is incomplete")


def require_resumable(checkpoint: Path, manifest: Manifest) -> None:
    """Check that the manifest has the settings that made the checkpoint.

    Raises:
        UserError: it lacks some; the manifest of weights alone has none.
    """
    wanted = ("fixed", "strategy", "topology", "step")
    missing = [name for name in wanted if getattr(manifest, name) in ({}, None)]
    if missing:
        raise UserError(
            f"{checkpoint / MANIFEST}: does not say what made the checkpoint (it lacks {', '.join(missing)})"
        )
