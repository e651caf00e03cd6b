"""Checks of the data files, and of the published weights to start from, before a run uses them."""

import logging
from pathlib import Path

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.files import sha256_of
from dsgpt.config.run_config import RunConfig
from dsgpt.data.token_file import TokenFile, TokenFileError, sidecar_path
from dsgpt.formats.hub import model_folder
from dsgpt.formats.tokenizer_files import fault_of, other_meaning, token_ids
from dsgpt.machine.console import Progress

logger = logging.getLogger(__name__)

TOKENIZER_FOLDER = "tokenizer"
"""Folder next to the token files; data preparation writes the tokenizer there."""


def data_tokenizer(file: TokenFile) -> tuple[Path | None, str]:
    """The folder of the tokenizer that made ``file``; None if the sidecar names none.

    Returns:
        The folder, and an empty message. If the tokenizer that the sidecar names is missing or a different one is
        there: None, and a message that says why the file must not be trained on.
    """
    folder, facts = file.path.parent / TOKENIZER_FOLDER, file.sidecar.tokenizer
    if facts is None:
        return None, ""
    try:
        fault = _tokenizer_fault(folder, facts.sha256, made=file.path.name)
    except OSError as error:
        fault = f"{error.filename}: cannot be read ({error.strerror})"
    if not fault:
        return folder, ""
    sidecar = sidecar_path(file.path).name
    return None, (
        f"{fault}; the trained model could not read or write text: copy the folder {TOKENIZER_FOLDER}/ that was made "
        f'with {file.path.name} to {file.path.parent}, or set "tokenizer" to null in {sidecar} to train without one'
    )


def _tokenizer_fault(folder: Path, sha256: str | None, *, made: str) -> str:
    """What is wrong with the tokenizer in ``folder``; empty if nothing is."""
    vocabulary = folder / "tokenizer.json"
    if not folder.is_dir() and not folder.is_symlink():
        return f"{folder}: is missing"
    if fault := fault_of(folder):
        return f"{folder}: {fault}"
    if not any(folder.iterdir()):
        return f"{folder}: is empty"
    if sha256 is None:  # made by another tool, or without a tokenizer.json
        return ""
    if not vocabulary.is_file():
        return f"{vocabulary}: is missing"
    return "" if sha256_of(vocabulary) == sha256 else f"{vocabulary}: is not the tokenizer that made {made}"


def data_hash(file: TokenFile, *, verify: bool, problems: Problems) -> str | None:
    """The sha256 that identifies the file in records: the sidecar's, or computed if that is missing or in doubt.

    Args:
        file: the token file.
        verify: always read the whole file, and also compare its largest id with the sidecar's vocabulary size.
        problems: receives what differs from the sidecar; if the hash differs, None is returned.
    """
    doubt = file.doubt()
    if file.sidecar.sha256 and not doubt and not verify:
        return file.sidecar.sha256
    progress, computed = Progress(total=file.size_bytes, what=f"hashing {file.path.name}", unit="B"), None
    try:
        computed = file.verified_sha256(progress.advance)
    except TokenFileError as error:
        problems.add(str(error))
    finally:
        progress.close()
    if doubt and computed:
        logger.info(f"{doubt}: hashed again; the sha256 is that of its sidecar")
    vocabulary = file.sidecar.vocab_size
    if verify and vocabulary is not None and (largest := file.largest_id()) >= vocabulary:
        problems.add(f"{file.path}: its largest id is {largest}, but its sidecar says a vocabulary of {vocabulary}")
    return computed


def initial_weights_hash(config: RunConfig) -> str | None:
    """The sha256 of the published weights that the run starts or started from; None for random ones."""
    if config.init_from is None:
        return None
    if config.init_from.sha256:
        return config.init_from.sha256
    weights = config.init_from.weights(config.model)
    progress = Progress(total=weights.bytes, what="hashing the initial weights", unit="B")
    computed = weights.sha256(progress.advance)
    progress.close()
    return computed


def check_tokenizer(config: RunConfig, problems: Problems) -> str:
    """Compare the data's tokenizer with that of the published weights: each id must mean the same in both.

    Args:
        config: the run.
        problems: receives a difference.

    Returns:
        What could not be checked; empty if everything was.
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
        lacking = source.given if theirs is None else config.train.path
        return f"--init_from: {lacking} has no tokenizer: not checked whether an id means the same to weights and data"
    different = other_meaning(ours, theirs)
    if different is not None:
        problems.add(
            f"--init_from {source.given}: its tokenizer did not make {config.train.path}, where id {ours[different]} "
            f"is {different!r}: prepare the text with it (data_prep/preprocess.py --tokenizer {source.given})"
        )
    return ""
