"""``dsgpt data verify``: reads token files, and compares them with what is noted beside them."""

from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.command_line import flag, read_options, run_script
from dsgpt.data.token_file import TokenFileError, open_token_file, sidecar_path

DESCRIPTION = """\
Read token files, and compare hash, size and largest id with what preparation noted beside them. Exit code 0: all
agree; 2: one differs, or cannot be read."""
EXAMPLES = """\
examples:
  dsgpt data verify data/python-stdlib/train.bin data/python-stdlib/val.bin"""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The command line."""

    files: tuple[Path, ...] = flag(Path, "BIN", "token files", default=(), name="files", nargs="+")


def verify(path: Path) -> str:
    """Read a token file whole; return what it holds, in words.

    Raises:
        TokenFileError: it cannot be read, or differs from its sidecar.
    """
    file = open_token_file(path)
    computed = file.verified_sha256()
    vocabulary, largest = file.sidecar.vocab_size, file.largest_id()
    if vocabulary is not None and largest >= vocabulary:
        raise TokenFileError(f"{path}: its largest id is {largest}, but its sidecar says a vocabulary of {vocabulary}")
    beside = sidecar_path(path).name if file.sidecar.sha256 else "nothing noted beside it"
    return f"{path}: {file.tokens:,} tokens, ids up to {largest:,}, sha256 {computed}: agrees with {beside}"


def main() -> None:
    """Verify every file that the command line names, a line each.

    Raises:
        UserError: with a line for each file that differs.
    """
    options, problems = read_options(VerifyOptions, description=DESCRIPTION, epilog=EXAMPLES)
    problems.raise_if_any()
    for path in options.files:
        try:
            print(verify(path), flush=True)
        except TokenFileError as error:
            problems.add(*error.problems)
    problems.raise_if_any()


if __name__ == "__main__":
    run_script(main)
