"""What a run knows of its data files before it trusts them."""

import hashlib
from pathlib import Path

from dsgpt.data.token_file import TokenFile
from dsgpt.problems import Problems
from dsgpt.telemetry.console import Console

TOKENIZER_FOLDER = "tokenizer"
"""Beside the token files, as data preparation leaves it."""


def data_tokenizer(file: TokenFile) -> tuple[Path | None, str]:
    """The folder of the tokenizer that made ``file``, None where there is none.

    Returns:
        The folder, and why a folder that is there is another tokenizer's, else no words.
    """
    folder = file.path.parent / TOKENIZER_FOLDER
    if file.sidecar.tokenizer is None or not folder.is_dir():
        return None, ""
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
