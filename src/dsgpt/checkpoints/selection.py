"""Finds the checkpoint that a flag names, and opens the files of its model."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST, Manifest, read_manifest, require_files
from dsgpt.common.errors import UserError
from dsgpt.common.files import is_regular_file
from dsgpt.common.json_files import JsonError, read_as
from dsgpt.formats.hugging_face import read_json
from dsgpt.formats.tensor_files import StoredTensor, open_safetensors
from dsgpt.formats.tokenizer_files import tokenizer_files
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import parameter_shapes


def is_hugging_face(source: Path) -> bool:
    """Whether a folder has the ``config.json`` of a Hugging Face model; a run folder's has no ``model_type``."""
    try:
        return not (source / MANIFEST).exists() and "model_type" in read_json(source / "config.json")
    except UserError:
        return False


def find_checkpoint(path: Path, *, which: str = "latest", flag: str) -> Path:
    """``path`` itself if it is a checkpoint, else the newest or the best one of the run folder ``path``.

    Args:
        path: a checkpoint, a folder that ``convert.py --to portable`` made, or a run folder.
        which: one of ``options.WHICH_CHECKPOINT``.
        flag: the flag that ``path`` was given with, for messages.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST).exists():
        if which == "best":
            raise UserError(
                f"{flag} {path}: is one checkpoint; --which best chooses among those of a run: name the run folder"
            )
        return path
    found = store.checkpoints(path) if path.is_dir() else []
    if links := store.linked(path):
        raise UserError(
            f"{flag} {path}: {links[-1].name} is a link, and links inside a run folder are not followed: "
            f"name the link itself ({flag} {links[-1]}), or remove it"
        )
    if not found:
        raise UserError(f"{flag} {path}: holds no checkpoint; name a run folder such as checkpoint/demo-zero1")
    return _best(path, found) if which == "best" else found[0]


def _best(run_dir: Path, found: list[Path]) -> Path:
    try:
        if not is_regular_file(run_dir / store.BEST):
            raise FileNotFoundError(run_dir / store.BEST)
        name = (run_dir / store.BEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--which best: {run_dir} does not say which of its checkpoints is the best, because none was saved after "
            "a validation: use --which latest"
        ) from error
    named = next((checkpoint for checkpoint in found if checkpoint.name == name), None)
    if named is None:
        raise UserError(f"--which best: {run_dir / store.BEST} names {name}, which does not exist: use --which latest")
    if named not in store.comparable(found):
        raise UserError(
            f"--which best: {run_dir / store.BEST} names {name}, which was validated on other data than the newest "
            "checkpoint, or before the data last changed: use --which latest"
        )
    return named


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """The verified files of a checkpoint's model."""

    checkpoint: Path
    manifest: Manifest
    config: GPT2Config
    tokenizer: Path | None
    """Its folder; None where the training data came without one."""

    @property
    def trained_length(self) -> int | None:
        """Tokens of the sequences that the model was trained on; None if the checkpoint does not say."""
        length = self.manifest.fixed.get(store.SEQUENCE_LENGTH)
        return length if isinstance(length, int) and 0 < length <= self.config.block_size else None

    @property
    def weights(self) -> Path:
        """The safetensors file, canonical names."""
        return self.checkpoint / store.WEIGHTS


def open_model_files(checkpoint: Path, *, progress: Callable[[int], None] = lambda _: None) -> ModelFiles:
    """Verify weights, shape and tokenizer; files that only a resume needs are not read.

    Args:
        checkpoint: the folder.
        progress: called with the bytes read since its last call.

    Raises:
        UserError: one of them is missing or damaged.
    """
    manifest = read_manifest(checkpoint, only=is_model_file, progress=progress)
    require_files(checkpoint, manifest, (store.WEIGHTS, store.MODEL))
    try:
        config = read_as(checkpoint / store.MODEL, GPT2Config)
    except JsonError as error:
        raise UserError(f"{checkpoint / store.MODEL}: is not the shape of a model ({error})") from error
    tokenizer = _tokenizer(checkpoint, manifest.files)
    return ModelFiles(checkpoint=checkpoint, manifest=manifest, config=config, tokenizer=tokenizer)


def _tokenizer(checkpoint: Path, named: Container[str]) -> Path | None:
    """The tokenizer's folder, all of whose files are in the manifest; None where there is none.

    Raises:
        UserError: it holds a file that a tokenizer would read and that the manifest does not name.
    """
    folder = checkpoint / store.TOKENIZER
    files = [] if folder.is_symlink() else tokenizer_files(folder)
    for file in files:
        if f"{store.TOKENIZER}/{file.name}" not in named:
            raise UserError(f"{file}: is not in {MANIFEST}, which names every file of a checkpoint: remove it")
    return folder if files else None


def open_weights(files: ModelFiles) -> dict[str, StoredTensor]:
    """Every weight by canonical name, in the model's order; none is read yet.

    Raises:
        UserError: they are not those of the checkpoint's model.
    """
    tensors, shapes = open_safetensors(files.weights), parameter_shapes(files.config)
    same = {name: tensor.shape for name, tensor in tensors.items()} == {name: tuple(s) for name, s in shapes.items()}
    if not same or any(tensor.dtype is None for tensor in tensors.values()):
        raise UserError(f"{files.weights}: its tensors are not those of {files.checkpoint / store.MODEL}")
    return {name: tensors[name] for name in shapes}


def is_model_file(name: str) -> bool:
    """Whether a file of a checkpoint, by its name in the manifest, is needed to use the model."""
    return name in (store.WEIGHTS, store.MODEL) or name.startswith(f"{store.TOKENIZER}/")
