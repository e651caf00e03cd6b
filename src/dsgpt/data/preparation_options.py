"""The command lines of ``preprocess.py``, ``preprocess_small.py`` and ``merge.py``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, TypeAlias

from dsgpt.common.command_line import COUNT, POSITIVE, Parser, Unfit, choice, flag, help_of, switch, value, whole
from dsgpt.common.files import is_utf8, printable, undecodable
from dsgpt.data.download import HUB_SETS, folder_if_named, set_name
from dsgpt.data.parts import OnBadText
from dsgpt.data.readers import STDIN
from dsgpt.data.sources import EMBEDDED, TRANSFORMERS_NAME
from dsgpt.data.vocabulary import SMALLEST_VOCABULARY
from dsgpt.formats.tokenizer_files import fault_of

TRAIN = "train"
DATASETS = (*EMBEDDED, *HUB_SETS)
_DEFAULT_VOCAB_SIZE = 8192
_DEFAULT_VAL_FRACTION = 0.05
_DECIDING = ("text_key", "tokenizer", "vocab_size", "val_fraction", "seed", "num_documents")
"""The options that decide the output's bytes, beside the input."""
_DECIDING_SINCE = ("split_by", "shuffle", "deduplicate", "on_bad_text", "special_tokens_in_text")
"""More of them; records of earlier versions lack these, so they are named only if they are not the default."""
Identity: TypeAlias = dict[str, str | int | float | None]
"""Options and hashes of inputs, by name."""


def shard_of(word: str) -> tuple[int, int]:
    """The value of ``--shard``: I and N of ``I/N``."""
    first, _, count = word.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise Unfit("I/N with I from 1 to N, such as 3/8")
    return int(first), int(count)


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    r"""The command line; ``parse_options`` resolves what is not given.

    Turn text into token files: train.bin and val.bin (little-endian ids without a header, as nanoGPT reads them), each
    with a .json that describes it, and tokenizer/, which transformers.AutoTokenizer loads. Every document ends with the
    end-of-text id. Without flags it prepares sources of the Python package transformers, 8 MB that are the same on
    every machine: no download, no account, a few seconds. The same command a second time changes nothing.

    Examples:
      .venv/bin/python data_prep/preprocess.py
      .venv/bin/python data_prep/preprocess.py --input books/ --tokenizer train --vocab_size 16384
      .venv/bin/python data_prep/preprocess.py --input notes.txt web.jsonl --text_key content --output_dir data/mine
      .venv/bin/python data_prep/download_data.py tinystories && \
        .venv/bin/python data_prep/preprocess.py --dataset tinystories
    """

    dataset: str | None = flag(
        set_name(DATASETS),
        "NAME",
        f"a set by name: {', '.join(DATASETS)}, or OWNER/NAME on the hub (default {TRANSFORMERS_NAME}; what does not "
        "begin with python- needs `.venv/bin/python data_prep/download_data.py NAME` first)",
    )
    """Name of a set; None if ``inputs`` are the user's own files."""
    inputs: tuple[Path, ...] = flag(Path, "PATH", default=(), name="--input", nargs="+")
    """your own text instead: files and folders, or - for standard input. A .jsonl (.jsonl.gz, .jsonl.zst), .parquet or
    .arrow file holds one document a row, any other file is one document of UTF-8 text; of folders every visible file is
    read, but no link"""
    text_key: str | None = flag(str, "KEY")
    """key or column of the text in rows (default: text, or else the only one of strings in the first row)"""
    tokenizer: str = flag(
        str,
        "WHICH",
        "`train` (a byte-level BPE, trained on the train split only), a local folder or a name on the Hugging Face hub "
        f"(default: {TRAIN} for {' and '.join(EMBEDDED)}, else gpt2)",
    )
    vocab_size: int | None = flag(
        whole(low=SMALLEST_VOCABULARY),
        "N",
        f"ids of a trained tokenizer, <|endoftext|> included (default {_DEFAULT_VOCAB_SIZE}, at least "
        f"{SMALLEST_VOCABULARY}); above 65,536 token files take 4 bytes an id, not 2",
    )
    """Ids of a new tokenizer; None for an existing one."""
    val_fraction: float | None = flag(
        value(float, accepts=lambda share: 0 < share < 1, must_be="a number above 0 and below 1, such as 0.05"),
        "F",
        "share of the documents for validation, chosen by a hash of seed and name (default "
        f"{_DEFAULT_VAL_FRACTION}); sets that have a validation split keep it",
    )
    seed: int = flag(COUNT, "N", "another seed chooses other validation documents (default %(default)s)", default=1337)
    output_dir: Path = flag(folder_if_named, "DIR")
    """receives the token files and tokenizer/ (default data/NAME, where NAME is the set's or the one input's)"""
    split_by: Literal["documents", "files"] = flag(choice(("documents", "files")), "WHAT", default="documents")
    """divide by documents, or keep all documents of a file in one split (default %(default)s)"""
    shuffle: bool = switch("put the documents of each split into a random order, which depends on --seed")
    deduplicate: bool = switch("keep only the first of documents with the same text, in both splits together")
    on_bad_text: OnBadText = flag(choice(("replace", "skip", "fail")), "HOW", default="fail")
    """text that is not valid Unicode: replace it by U+FFFD, skip the document, or fail (default %(default)s)"""
    special_tokens_in_text: bool = switch()
    """the names of special tokens in a text, such as <|endoftext|>, become those tokens; otherwise they are text"""
    workers: int | None = flag(POSITIVE, "N")
    """processes that encode (default: one for each core, for large inputs); the result is the same"""
    shard: tuple[int, int] | None = flag(shard_of, "I/N")
    """only encode part I of N, from 1; `dsgpt data merge` with the same flags joins them"""
    num_documents: int | None = flag(whole(low=2), "N")
    """how many documents, training and validation together (at least 2)"""
    overwrite: bool = switch("replace what an earlier run with other options left there")

    @property
    def share(self) -> float:
        """``val_fraction``, or its default."""
        return self.val_fraction or _DEFAULT_VAL_FRACTION

    def identity(self) -> Identity:
        """The options that decide the output's bytes. If they and the input are the same, so is the output."""
        inputs = ", ".join(printable(path.resolve().name) for path in self.inputs)
        source = {"--input": inputs} if self.dataset is None else {"--dataset": self.dataset}
        since = [name for name in _DECIDING_SINCE if getattr(self, name) != getattr(PrepareOptions, name)]
        values = {f"--{name}": getattr(self, name) for name in (*_DECIDING, *since)}
        return source | values | {"--text_key": self.text_key or "text"}


class SmallOptions(PrepareOptions):
    """Those of ``preprocess_small.py``.

    As preprocess.py with the same flags, but for the first N documents only: train_small.bin and val_small.bin, for a
    quick look. Of the N, --val_fraction (at least one) are the first of the validation documents, the others the first
    of the training documents. Small and full files share the folder and its tokenizer/, which `--tokenizer train`
    trains on the whole train split in both cases, so a model trained on one can be evaluated on the other.

    Examples:
      .venv/bin/python data_prep/preprocess_small.py --num_documents 100
      .venv/bin/python data_prep/preprocess_small.py --num_documents 1000 --dataset tinystories
    """


class MergeOptions(PrepareOptions):
    """Those of ``merge.py``.

    Join what `dsgpt data prepare --shard I/N` encoded for every I. Give the same flags without --shard: the files are
    those that one preparation writes. Duplicates in different shards are found here; split and order are decided here.
    The text is not encoded again: a part that is missing is an error.

    Examples:
      .venv/bin/python data_prep/merge.py --input /data/web --tokenizer gpt2 --output_dir data/web --deduplicate
    """


_LEFT_OUT = {
    PrepareOptions: {"num_documents"},
    SmallOptions: {"shard"},
    MergeOptions: {"num_documents", "shard", "workers"},
}
"""The flags that a script lacks."""


def parse_options(argv: Sequence[str] | None = None, *, small: bool, merge: bool = False) -> PrepareOptions:
    """Read the command line; by default that of this process.

    Raises:
        UserError: all of its mistakes, one line each.
    """
    kind = SmallOptions if small else MergeOptions if merge else PrepareOptions
    parser = Parser(**help_of(kind))
    parser.add_flags(kind, names=[field.name for field in fields(kind) if field.name not in _LEFT_OUT[kind]])
    given, problems = parser.read(PrepareOptions, argv), parser.problems
    if given.inputs and given.dataset:
        problems.add("--input and --dataset: one preparation reads either your own files or a named set; drop one")
    missing = [path for path in given.inputs if not path.exists() and path != STDIN]
    problems.add(*(f"--input {path}: there is no such file or folder" for path in missing))
    dataset = None if given.inputs else given.dataset or TRANSFORMERS_NAME
    if dataset and given.text_key is not None:
        problems.add("--text_key: only the files of --input have keys to choose from; leave it out")
    tokenizer = given.tokenizer or (TRAIN if dataset in EMBEDDED else "gpt2")
    if tokenizer != TRAIN and given.vocab_size is not None:
        problems.add(f"--vocab_size: the tokenizer {tokenizer} has its own; leave it out, or use --tokenizer train")
    options = replace(
        given,
        dataset=dataset,
        tokenizer=tokenizer,
        vocab_size=given.vocab_size or (_DEFAULT_VOCAB_SIZE if tokenizer == TRAIN else None),
        output_dir=given.output_dir or Path("data") / (dataset or given.inputs[0].resolve().stem),
    )
    if given.output_dir is None and len(given.inputs) > 1:
        problems.add("--output_dir: is missing; several inputs have no common name, say where the output goes")
    if given.output_dir is None and not is_utf8(options.output_dir):
        problems.add(f"{undecodable(options.output_dir)}, or name another --output_dir")
    if STDIN in given.inputs and (len(given.inputs) > 1 or tokenizer == TRAIN or given.output_dir is None):
        problems.add("--input -: is read once: give no other input, a --tokenizer that exists, and an --output_dir")
    if given.shard and (tokenizer == TRAIN or given.num_documents or STDIN in given.inputs):
        problems.add("--shard: needs a --tokenizer that exists, and all documents of files")
    resolved = options.output_dir.resolve()
    if any(path.resolve() == resolved for path in given.inputs):
        problems.add(f"--output_dir {options.output_dir}: is the input itself; name another folder")
    nearest = next(path for path in (resolved, *resolved.parents) if path.exists())
    if not nearest.is_dir():
        problems.add(f"--output_dir {options.output_dir}: {nearest} is a file, not a folder")
    if small and given.num_documents is None and not problems.mention("--num_documents"):
        problems.add("--num_documents: is missing; say how many documents, for example --num_documents 100")
    problems.add(*_faults_of_name(tokenizer))
    problems.raise_if_any()
    return options


def _faults_of_name(tokenizer: str) -> Iterator[str]:
    """What is wrong with the value of ``--tokenizer``."""
    if not is_utf8(tokenizer):
        yield f"--tokenizer {undecodable(tokenizer)}"
    elif tokenizer != TRAIN and Path(tokenizer).is_dir():
        if fault := fault_of(Path(tokenizer), named=True):
            yield f"--tokenizer {tokenizer}: {fault}"
    elif tokenizer.startswith((".", "/", "~")) or tokenizer.count("/") > 1 or tokenizer.endswith("/"):
        yield f"--tokenizer {tokenizer}: there is no such folder; it should hold a tokenizer.json"
