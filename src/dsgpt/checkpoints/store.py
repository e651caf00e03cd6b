"""Checkpoints of a run folder: each is complete or absent, and verified before anything in it is read.

    step-00000200/
        model.safetensors            every weight, fp32, by canonical name; of several ranks see ``training_state``
        model.json                   the shape of the model
        optimizer.safetensors        every moment of the optimizer; see ``training_state``
        training_state.json          the number of optimizer steps, and the loss scale
        run_state.json               the progress of the run
        random-00000.safetensors     random state, one file per rank
        tokenizer/                   where the data has one
        manifest.json                every file above with size and sha256; written last
    latest                           name of the newest
    best                             name of the one with the lowest validation loss on the newest one's validation set

Links inside a run folder are not followed, neither to a checkpoint nor to a file of one.

A checkpoint is written in a hidden folder of the run, made durable, and renamed. This module finds checkpoints by
the folders themselves. ``latest`` and ``best`` are for people and other tools; ``--which best`` reads ``best``, and a
resume warns if the checkpoint that ``latest`` names is missing and would be newer.

The best is chosen among checkpoints at whose own step a validation ran, because a loss measured some steps earlier
belongs to other weights. Where the validation set changed, only checkpoints since the last change count: until one of
them has a validation loss, there is no best. Retention keeps the newest and the best.
"""

import contextlib
import errno
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgpt.checkpoints.manifest import MANIFEST, FileFacts, Manifest, RunState, parse_manifest, read_manifest
from dsgpt.common.errors import UserError
from dsgpt.common.files import is_regular_file, link_between, remove, sync_directory, write_atomic, write_json_atomic
from dsgpt.common.json_files import JsonError, read_object, read_or_refuse
from dsgpt.formats.tokenizer_files import KNOWN_FILES, tokenizer_files
from dsgpt.model.config import GPT2Config

LATEST = "latest"
BEST = "best"
"""Names the checkpoint with the lowest validation loss."""
VALIDATED_ON = ("validation data", "validation windows", "sequence length")
"""Keys of a manifest's ``fixed``: validation losses can be compared only where all of these are equal."""
WEIGHTS = "model.safetensors"
MODEL = "model.json"
INDEX = "pieces.json"
"""Index of the pieces, which only several ranks write; see ``training_state``."""
_PIECES_OF_WEIGHTS = re.compile(r"model-\d{5,}\.safetensors")
TOKENIZER = "tokenizer"
_NAME = r"step-(\d{8}|[1-9]\d{8,})"
STEP_FOLDER = re.compile(_NAME)
PARTIAL_FOLDER = re.compile(rf"\.partial-{_NAME}(\.old|\.replaced|\.overwritten)?")
"""A checkpoint that is being written. With a suffix, one that retention removes (``.old``), that a new one of the same
step replaces (``.replaced``), or that is removed with its whole run (``.overwritten``)."""
REMOVED, REPLACED, OVERWRITTEN, DAMAGED = ".old", ".replaced", ".overwritten", ".damaged"
DAMAGED_FOLDER = re.compile(rf"{_NAME}\.damaged")
"""A checkpoint that a resume refused; kept so that a user can examine it."""


def folder_name(step: int) -> str:
    """``step-00000200`` for 200."""
    return f"step-{step:08d}"


def partial_folder(run_dir: Path, step: int) -> Path:
    """Folder in which the checkpoint of ``step`` is written before it is published."""
    return run_dir / f".partial-{folder_name(step)}"


def begin(run_dir: Path, step: int) -> Path:
    """Make the empty folder that all ranks write into; main rank only."""
    folder = partial_folder(run_dir, step)
    remove(folder)
    folder.mkdir(parents=True)
    return folder


def publish(
    run_dir: Path, folder: Path, *, state: RunState, about: dict[str, Any], written: Mapping[str, FileFacts]
) -> Path:
    """Turn the complete ``folder`` into a checkpoint, durable and with its manifest; main rank only.

    Args:
        run_dir: the run.
        folder: from ``begin``, every file of every rank in it.
        state: the progress of the run.
        about: strategy, topology, versions and the settings that a resumed run must match.
        written: the files that ranks have made durable and hashed themselves, by name.

    Raises:
        OSError: the file system refuses, or shows a file of another rank otherwise than that rank wrote it. Earlier
            checkpoints are unchanged.
    """
    state.write(folder)
    for name, facts in written.items():
        if (folder / name).stat().st_size != facts.size:
            raise OSError(errno.EIO, "is not as large as the rank that wrote it says", str(folder / name))
    paths = sorted(path for path in folder.rglob("*") if link_between(folder, path) is None)
    files = {
        path.relative_to(folder).as_posix(): asdict(written.get(path.name) or FileFacts.synced(path))
        for path in paths
        if path.is_file() and (path.parent != folder / TOKENIZER or path.name in KNOWN_FILES)
    }
    for path in paths:
        if path.is_dir():
            sync_directory(path)
    write_json_atomic(folder / MANIFEST, {**about, "step": state.step, "val_loss": state.val_loss, "files": files})
    final = run_dir / folder_name(state.step)
    set_aside(final, suffix=REPLACED)
    try:
        folder.rename(final)
    except OSError:
        put_back(run_dir)
        raise
    sync_directory(run_dir)
    return final


def put_back(run_dir: Path) -> None:
    """Rename a checkpoint back, if the one that was to replace it was never published."""
    for old in replaced(run_dir):
        final = run_dir / old.name.removeprefix(".partial-").removesuffix(REPLACED)
        if not final.exists() and not old.is_symlink():
            old.rename(final)


def replaced(run_dir: Path) -> list[Path]:
    """Checkpoints that were to be replaced and are still there, because the process was killed in between."""
    return [path for path in run_dir.glob(f".partial-step-*{REPLACED}") if not path.is_symlink()]


def was_overwritten(run_dir: Path) -> bool:
    """Whether ``--overwrite`` was killed while it removed this run; what is left of it must not be resumed."""
    return any(run_dir.glob(f".partial-step-*{OVERWRITTEN}"))


def keep_newest(run_dir: Path, *, count: int, needed: Container[Path] = ()) -> None:
    """Update ``latest`` and ``best``, and remove all checkpoints but these, the ``count`` newest and those ``needed``.

    Main rank only.

    Raises:
        OSError: the file system refuses.
    """
    newest_first = checkpoints(run_dir)
    best = _best(newest_first)
    for link in linked(run_dir):
        remove(link)
    for old in newest_first[count:]:  # first, because what follows may need the space
        if old != best and old not in needed:
            discard(old)
    for old in replaced(run_dir):
        remove(old)
    name_newest_and_best(run_dir)


def name_newest_and_best(run_dir: Path) -> None:
    """Write ``latest`` and ``best`` from the folders that exist."""
    newest_first = checkpoints(run_dir)
    for name, checkpoint in ((LATEST, newest_first[0] if newest_first else None), (BEST, _best(newest_first))):
        if checkpoint is not None:
            write_atomic(run_dir / name, f"{checkpoint.name}\n".encode())
        else:
            remove(run_dir / name)


def _best(newest_first: list[Path]) -> Path | None:
    """The comparable checkpoint with the lowest validation loss of its own; of equal ones the oldest.

    ``newest_first`` is newest first.
    """
    losses = {checkpoint: manifest.val_loss for checkpoint, manifest in comparable(newest_first).items()}
    validated = [(loss, step_of(each.name), each) for each, loss in losses.items() if loss is not None]
    return min(validated)[2] if validated else None


def comparable(newest_first: list[Path]) -> dict[Path, Manifest]:
    """Manifests of the checkpoints, newest first, that were made since the validation set last changed.

    If a run returned to an earlier validation set, checkpoints from before the change do not count, as in
    ``best_val_loss``. Damaged ones are left out.
    """
    newest, manifests = None, dict[Path, Manifest]()
    for checkpoint in newest_first:
        with contextlib.suppress(UserError):
            manifest = parse_manifest(checkpoint)
            validated_on = [manifest.fixed.get(name) for name in VALIDATED_ON]
            newest = newest or validated_on
            if validated_on != newest:
                break
            manifests[checkpoint] = manifest
    return manifests


def step_of(name: str) -> int:
    """200 for ``step-00000200``."""
    return int(name.removeprefix("step-"))


def set_aside(checkpoint: Path, *, suffix: str = REMOVED) -> Path | None:
    """Rename a checkpoint out of the run, and return the folder that is left to remove; a link is removed here."""
    if checkpoint.is_symlink() or not checkpoint.is_dir():
        remove(checkpoint)
        return None
    aside = checkpoint.with_name(f".partial-{checkpoint.name.removesuffix(DAMAGED)}{suffix}")
    remove(aside)
    return checkpoint.rename(aside)


def mark_damaged(checkpoint: Path) -> None:
    """Rename a refused checkpoint out of the run: retention must not count it, and its step is saved again."""
    marked = checkpoint.with_name(f"{checkpoint.name}{DAMAGED}")
    remove(marked)
    checkpoint.rename(marked)


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint; a kill or a power cut never leaves a folder with its name and only some of its files."""
    if aside := set_aside(checkpoint):
        sync_directory(checkpoint.parent)
        remove(aside)


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run that have a manifest, newest first."""
    return [path for path in candidates(run_dir) if is_regular_file(path / MANIFEST)]


def candidates(run_dir: Path) -> list[Path]:
    """Every folder that is named like a checkpoint, newest first; some may be damaged or incomplete."""
    named = (path for path in run_dir.glob("step-*") if STEP_FOLDER.fullmatch(path.name) and path.is_dir())
    return sorted((path for path in named if not path.is_symlink()), key=lambda path: step_of(path.name), reverse=True)


def linked(run_dir: Path) -> list[Path]:
    """Links that are named like checkpoints; none of them is a checkpoint of this run."""
    return sorted(path for path in run_dir.glob("step-*") if STEP_FOLDER.fullmatch(path.name) and path.is_symlink())


# Finds the checkpoint that a flag names, and verifies the files of its model.


def is_hugging_face(source: Path) -> bool:
    """Whether a folder has the ``config.json`` of a Hugging Face model; a run folder's has no ``model_type``."""
    try:
        return not (source / MANIFEST).exists() and "model_type" in read_object(source / "config.json")
    except JsonError:
        return False


def find_checkpoint(path: Path, *, which: str = "latest", flag: str) -> Path:
    """``path`` itself if it is a checkpoint, else the newest or the best one of the run folder ``path``.

    Args:
        path: a checkpoint, a folder that ``convert.py --to portable`` made, or a run folder.
        which: ``latest`` or ``best``.
        flag: the flag that ``path`` was given with, for messages.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST).exists():
        if which == "best":
            how = "--which best chooses among those of a run"
            raise UserError(f"{flag} {path}: is one checkpoint; {how}: name the run folder")
        return path
    newest_first = checkpoints(path) if path.is_dir() else []
    if links := linked(path):
        found = f"{links[-1].name} is a link, and links inside a run folder are not followed"
        raise UserError(f"{flag} {path}: {found}: name the link itself ({flag} {links[-1]}), or remove it")
    if not newest_first:
        raise UserError(f"{flag} {path}: holds no checkpoint; name a run folder such as checkpoint/demo-zero1")
    return _named_best(path, newest_first) if which == "best" else newest_first[0]


def _named_best(run_dir: Path, newest_first: list[Path]) -> Path:
    try:
        if not is_regular_file(run_dir / BEST):
            raise FileNotFoundError(run_dir / BEST)
        name = (run_dir / BEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = "does not say which of its checkpoints is the best, because none was saved after a validation"
        raise UserError(f"--which best: {run_dir} {why}: use --which latest") from error
    named = next((checkpoint for checkpoint in newest_first if checkpoint.name == name), None)
    if named is None:
        raise UserError(f"--which best: {run_dir / BEST} names {name}, which does not exist: use --which latest")
    if named not in comparable(newest_first):
        other = "which was validated on other data than the newest checkpoint, or before the data last changed"
        raise UserError(f"--which best: {run_dir / BEST} names {name}, {other}: use --which latest")
    return named


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The verified files of a checkpoint's model."""

    checkpoint: Path
    manifest: Manifest
    config: GPT2Config
    tokenizer: Path | None
    """Folder of the tokenizer; None where the training data has none."""


def open_model_files(checkpoint: Path, *, progress: Callable[[int], None] = lambda _: None) -> ModelFiles:
    """Verify weights, shape and tokenizer; files that only a resume needs are not read.

    Args:
        checkpoint: the folder.
        progress: called with the bytes read since its last call.

    Raises:
        UserError: one of them is missing or damaged, or a file of the tokenizer is not in the manifest.
    """
    manifest = read_manifest(checkpoint, only=is_model_file, progress=progress)
    manifest.require(checkpoint, (INDEX if INDEX in manifest.files else WEIGHTS, MODEL))
    config = read_or_refuse(checkpoint / MODEL, GPT2Config, "the shape of a model")
    folder = checkpoint / TOKENIZER
    files = [] if folder.is_symlink() else tokenizer_files(folder)
    for file in files:
        if f"{TOKENIZER}/{file.name}" not in manifest.files:
            raise UserError(f"{file}: is not in {MANIFEST}, which names every file of a checkpoint: remove it")
    return ModelFiles(checkpoint=checkpoint, manifest=manifest, config=config, tokenizer=folder if files else None)


def is_model_file(name: str) -> bool:
    """Whether a file of a checkpoint, by its name in the manifest, is needed to use the model."""
    of_the_weights = name in (WEIGHTS, MODEL, INDEX) or _PIECES_OF_WEIGHTS.fullmatch(name) is not None
    return of_the_weights or name.startswith(f"{TOKENIZER}/")
