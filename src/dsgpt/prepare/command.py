"""The command lines of ``data_prep/preprocess.py`` and ``data_prep/preprocess_small.py``."""

from collections.abc import Sequence

from dsgpt.prepare.options import parse_options
from dsgpt.prepare.preparation import prepare

DESCRIPTION = """\
Turn text into token files: train.bin and val.bin (little-endian ids without a header, as nanoGPT reads them), each with
a .json that describes it, and tokenizer/, which transformers.AutoTokenizer loads. Every document ends with the
end-of-text id. Without flags it prepares the text that ships with Python itself, about 12 MB (Debian's packages hold a
bit less): no download, no account, under a minute. The same command a second time changes nothing."""

EXAMPLES = """\
  .venv/bin/python data_prep/preprocess.py
  .venv/bin/python data_prep/preprocess.py --input books/ --tokenizer train --vocab_size 16384
  .venv/bin/python data_prep/preprocess.py --input notes.txt web.jsonl --text_key content --output_dir data/mine
  .venv/bin/python data_prep/download_data.py tinystories && \\
    .venv/bin/python data_prep/preprocess.py --dataset tinystories"""

SMALL_DESCRIPTION = """\
As preprocess.py with the same flags, but for the first N documents only: train_small.bin and val_small.bin, for a quick
look. Of the N, --val_fraction (at least one) are the first of the validation documents, the others the first of the
training documents. Small and full files share the folder and its tokenizer/, which `--tokenizer train` trains on the
whole train split in both cases, so a model trained on one can be evaluated on the other."""

SMALL_EXAMPLES = """\
  .venv/bin/python data_prep/preprocess_small.py --num_documents 100
  .venv/bin/python data_prep/preprocess_small.py --num_documents 1000 --dataset tinystories"""


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare what the command line of ``preprocess.py`` asks for."""
    prepare(parse_options(argv, description=DESCRIPTION, examples=EXAMPLES, small=False))


def main_small(argv: Sequence[str] | None = None) -> None:
    """Prepare what the command line of ``preprocess_small.py`` asks for."""
    prepare(parse_options(argv, description=SMALL_DESCRIPTION, examples=SMALL_EXAMPLES, small=True))
