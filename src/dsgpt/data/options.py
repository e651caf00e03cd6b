"""The flags of the preparation scripts, and what these scripts print."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NoReturn, TypeAlias

from tqdm import tqdm

from dsgpt.common.command_line import Parser, choice, flag, switch, value, whole
from dsgpt.common.errors import Problems
from dsgpt.common.files import is_utf8, printable, undecodable
from dsgpt.data.sources import HUB_SETS, STDLIB_NAME
from dsgpt.data.vocabulary import SMALLEST_VOCABULARY
from dsgpt.formats.tokenizer_files import fault_of

# What the preparation scripts print: counts, durations and progress bars.

Bar: TypeAlias = "tqdm[NoReturn]"
"""A progress bar that the caller updates; it does not wrap an iterable."""
KEPT = "nothing was published; the same command starts again"
"""Ends the error line after an interruption, or if the disk is full."""


def folder_if_named(word: str) -> Path | None:
    """The value of a flag that names a folder; None for an empty word, such as an unset variable of the shell."""
    return Path(word) if word else None


def duration(seconds: float) -> str:
    """Whole seconds, or ``less than 1 s``."""
    return "less than 1 s" if seconds < 1 else f"{seconds:.0f} s"


@contextlib.contextmanager
def progress(*, total: int | None, description: str, unit: str) -> Iterator[Bar]:
    """A progress bar with an estimate of the time left; nothing is shown if standard error is not a terminal.

    If the work ends early without an error (a limit was reached, documents were empty), the bar ends at 100 %.

    Args:
        total: amount of work, in bytes (``unit`` "B") or other units; None if unknown.
        description: what is being done, in a word or two.
        unit: the unit of ``total``.
    """
    with tqdm(
        total=total, desc=description, unit=unit, unit_scale=True, mininterval=0.2, maxinterval=0.4,
        dynamic_ncols=True, disable=not sys.stderr.isatty(),
    ) as bar:  # fmt: skip
        try:
            yield bar
        except GeneratorExit:  # the reader of the rows stopped early
            bar.total = bar.n
            raise
        bar.total = bar.n


TRAIN = "train"
DATASETS = (STDLIB_NAME, *HUB_SETS)
_DEFAULT_VOCAB_SIZE = 8192
_DEFAULT_VAL_FRACTION = 0.05


Identity: TypeAlias = dict[str, str | int | float | None]
"""Options and hashes of inputs, by name."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The command line; ``parse_options`` resolves what is not given."""

    dataset: str | None = flag(
        choice(DATASETS),
        "NAME",
        f"a set by name: {', '.join(DATASETS)} (default {STDLIB_NAME}, which needs no download; the others need "
        "`.venv/bin/python data_prep/download_data.py NAME` first)",
    )
    """None if ``inputs`` are the user's own files."""
    inputs: tuple[Path, ...] = flag(
        Path,
        "PATH",
        "your own text instead: files and folders. A .jsonl or .parquet file holds one document a row, any other file "
        "is one document of UTF-8 text; of folders every visible file is read, but no link",
        default=(),
        name="--input",
        nargs="+",
    )
    text_key: str = flag(str, "KEY", "key or column of the text in .jsonl and .parquet rows (default text)")
    tokenizer: str = flag(
        str,
        "WHICH",
        "`train` (a byte-level BPE, trained on the train split only), a local folder or a name on the Hugging Face hub "
        f"(default: {TRAIN} for {STDLIB_NAME}, else gpt2)",
    )
    vocab_size: int | None = flag(
        whole(low=SMALLEST_VOCABULARY),
        "N",
        f"ids of a trained tokenizer, <|endoftext|> included (default {_DEFAULT_VOCAB_SIZE}, at least "
        f"{SMALLEST_VOCABULARY}); above 65,536 token files take 4 bytes an id, not 2",
    )
    """None for an existing tokenizer."""
    val_fraction: float | None = flag(
        value(float, accepts=lambda share: 0 < share < 1, must_be="a number above 0 and below 1, such as 0.05"),
        "F",
        "share of the documents for validation, chosen by a hash of seed and name (default "
        f"{_DEFAULT_VAL_FRACTION}); sets that have a validation split keep it",
    )
    seed: int = flag(
        whole(low=0), "N", "another seed chooses other validation documents (default %(default)s)", default=1337
    )
    output_dir: Path = flag(
        folder_if_named,
        "DIR",
        "receives the token files and tokenizer/ (default data/NAME, where NAME is the set's or the one input's)",
    )
    num_documents: int | None = flag(
        whole(low=2), "N", "how many documents, training and validation together (at least 2)"
    )
    """Of the small files; None for all documents."""
    overwrite: bool = switch("replace what an earlier run with other options left there")

    @property
    def suffix(self) -> str:
        """Suffix of the names of the output files: ``_small`` if only the first documents are prepared."""
        return "" if self.num_documents is None else "_small"

    @property
    def validation_share(self) -> float:
        """``val_fraction`` or its default."""
        return _DEFAULT_VAL_FRACTION if self.val_fraction is None else self.val_fraction

    def identity(self) -> Identity:
        """The options that decide the output's bytes. If they and the input are the same, so is the output."""
        return {
            "--input" if self.dataset is None else "--dataset": self.dataset
            or ", ".join(printable(path.resolve().name) for path in self.inputs),
            "--text_key": self.text_key,
            "--tokenizer": self.tokenizer,
            "--vocab_size": self.vocab_size,
            "--val_fraction": self.val_fraction,
            "--seed": self.seed,
            "--num_documents": self.num_documents,
        }


def parse_options(argv: Sequence[str] | None = None, *, description: str, examples: str, small: bool) -> PrepareOptions:
    """Read the command line.

    Args:
        argv: the words; by default those of this process.
        description: of the script, for ``--help``.
        examples: commands that ``--help`` ends with.
        small: whether only the first ``--num_documents`` documents are prepared.

    Raises:
        UserError: all of its mistakes, one line each.
    """
    parser = Parser(description=description, epilog=f"examples:\n{examples}")
    names = [field.name for field in fields(PrepareOptions) if small or field.name != "num_documents"]
    parser.add_flags(PrepareOptions, names=names)
    given, problems = parser.read(PrepareOptions, argv), parser.problems
    if given.inputs and given.dataset:
        problems.add("--input and --dataset: one preparation reads either your own files or a named set; drop one")
    problems.add(*(f"--input {path}: there is no such file or folder" for path in given.inputs if not path.exists()))
    dataset = None if given.inputs else given.dataset or STDLIB_NAME
    if dataset and given.text_key is not None:
        problems.add("--text_key: only the files of --input have keys to choose from; leave it out")
    tokenizer = given.tokenizer or (TRAIN if dataset == STDLIB_NAME else "gpt2")
    if tokenizer != TRAIN and given.vocab_size is not None:
        problems.add(f"--vocab_size: the tokenizer {tokenizer} has its own; leave it out, or use --tokenizer train")
    options = replace(
        given,
        dataset=dataset,
        text_key=given.text_key or "text",
        tokenizer=tokenizer,
        vocab_size=given.vocab_size or (_DEFAULT_VOCAB_SIZE if tokenizer == TRAIN else None),
        output_dir=_output_dir(given, dataset, problems),
    )
    if small and given.num_documents is None and not problems.mention("--num_documents"):
        problems.add("--num_documents: is missing; say how many documents, for example --num_documents 100")
    _check_tokenizer_path(tokenizer, problems)
    problems.raise_if_any()
    return options


def _output_dir(given: PrepareOptions, dataset: str | None, problems: Problems) -> Path:
    if given.output_dir is None and len(given.inputs) > 1:
        problems.add("--output_dir: is missing; several inputs have no common name, say where the output goes")
    output_dir: Path = given.output_dir or Path("data") / (dataset or given.inputs[0].resolve().stem)
    if given.output_dir is None and not is_utf8(output_dir):
        problems.add(f"{undecodable(output_dir)}, or name another --output_dir")
    resolved = output_dir.resolve()
    if any(path.resolve() == resolved for path in given.inputs):
        problems.add(f"--output_dir {output_dir}: is the input itself; name another folder")
    nearest = next(path for path in (resolved, *resolved.parents) if path.exists())
    if not nearest.is_dir():
        problems.add(f"--output_dir {output_dir}: {nearest} is a file, not a folder")
    return output_dir


def _check_tokenizer_path(tokenizer: str, problems: Problems) -> None:
    if not is_utf8(tokenizer):
        problems.add(f"--tokenizer {undecodable(tokenizer)}")
        return
    looks_local = tokenizer.startswith((".", "/", "~")) or tokenizer.count("/") > 1 or tokenizer.endswith("/")
    if looks_local and not Path(tokenizer).is_dir():
        problems.add(f"--tokenizer {tokenizer}: there is no such folder; it should hold a tokenizer.json")
    if tokenizer != TRAIN and Path(tokenizer).is_dir() and (fault := fault_of(Path(tokenizer), named=True)):
        problems.add(f"--tokenizer {tokenizer}: {fault}")
