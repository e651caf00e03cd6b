"""What a run knows of its data files before it trusts them."""

from dsgpt.data.token_file import TokenFile
from dsgpt.problems import Problems
from dsgpt.telemetry.console import Console


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
