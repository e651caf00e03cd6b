"""What a run knows of its data files, and of published weights to start from, before it trusts them."""

import hashlib
from pathlib import Path

from dsgpt.config import RunConfig
from dsgpt.data.token_file import TokenFile
from dsgpt.errors import UserError
from dsgpt.model.hub_models import model_folder
from dsgpt.model.vocabulary_files import token_ids
from dsgpt.problems import Problems
from dsgpt.telemetry.console import Console
from dsgpt.tokenizer_files import fault_of

TOKENIZER_FOLDER = "tokenizer"
"""Beside the token files, as data preparation leaves it."""


def data_tokenizer(file: TokenFile) -> tuple[Path | None, str]:
    """The folder of the tokenizer that made ``file``, None where there is none to take along.

    Training itself needs no tokenizer: one that nobody could open later is left out of checkpoints, not refused.

    Returns:
        The folder, and why a folder that is there is left out (it holds links, brings code, or belongs to other data),
        else no words.
    """
    folder = file.path.parent / TOKENIZER_FOLDER
    if file.sidecar.tokenizer is None or not (folder.is_dir() or folder.is_symlink()):
        return None, ""
    if fault := fault_of(folder):
        return None, f"{folder}: {fault}; until then, checkpoints will hold no tokenizer"
    claimed, vocabulary = file.sidecar.tokenizer.get("sha256"), folder / "tokenizer.json"
    if claimed and vocabulary.is_file() and hashlib.sha256(vocabulary.read_bytes()).hexdigest() != claimed:
        return None, f"{folder} is not the tokenizer that made {file.path.name}: checkpoints will hold no tokenizer"
    return folder, ""


def data_hash(file: TokenFile, *, verify: bool, console: Console, problems: Problems) -> str:
    """The sha256 by which records name the file: the sidecar's, or computed where there is none.

    Args:
        file: the token file.
        verify: read the file whole and hold hash and largest id against the sidecar.
        console: shows the progress of reading.
        problems: takes what does not agree.
    """
    claimed = file.sidecar.sha256
    if claimed and not verify:
        return claimed
    progress = console.progress(total=file.size_bytes, what=f"hashing {file.path.name}", unit="B")
    computed = file.computed_sha256(progress.advance)
    progress.close()
    if claimed and computed != claimed:
        problems.add(
            f"{file.path}: its sha256 is {computed}, its sidecar says {claimed}: the file changed, make it again"
        )
    vocabulary = file.sidecar.vocab_size
    if verify and vocabulary is not None and (largest := file.largest_id()) >= vocabulary:
        problems.add(f"{file.path}: its largest id is {largest}, but its sidecar says a vocabulary of {vocabulary}")
    return computed


def initial_weights_hash(config: RunConfig, console: Console) -> str | None:
    """The sha256 of the published weights that the run starts or started from; None for random ones."""
    if config.init_from is None or config.init_from.sha256:
        return config.init_from and config.init_from.sha256
    weights = config.init_from.weights(config.model)
    progress = console.progress(total=weights.bytes, what="hashing the initial weights", unit="B")
    computed = weights.sha256(progress.advance)
    progress.close()
    return computed


def check_tokenizer(config: RunConfig, problems: Problems) -> str:
    """Hold the data's tokenizer against that of the published weights, to which every id has a meaning already.

    Returns:
        What could not be checked, else no words.
    """
    source = config.init_from
    if source is None or source.sha256:
        return ""
    data, _ = data_tokenizer(config.train)
    try:
        theirs = token_ids(model_folder(source.given, weights=False))
        ours = token_ids(data) if data else None
    except UserError as error:
        problems.add(*error.problems)
        return ""
    if theirs is None or ours is None:
        silent = source.given if theirs is None else config.train.path
        return f"--init_from: {silent} comes without a tokenizer, so nobody can tell whether ids mean the same to both"
    different = next((text for text, number in ours.items() if theirs.get(text) != number), None)
    if different is not None:
        problems.add(
            f"--init_from {source.given}: its tokenizer did not make {config.train.path}, where id {ours[different]} "
            f"is {different!r}: prepare the text with it (data_prep/preprocess.py --tokenizer {source.given})"
        )
    return ""
