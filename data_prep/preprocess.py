"""Turn text into token files for training; see --help."""

from collections.abc import Sequence

from dsgpt.common.script import run_script
from dsgpt.prepare.console import KEPT
from dsgpt.prepare.options import parse_options
from dsgpt.prepare.preparation import prepare

DESCRIPTION = """\
Turn text into token files: train.bin and val.bin (little-endian ids without a header, as nanoGPT reads them), each with
a .json that says what it holds, and tokenizer/, which transformers.AutoTokenizer loads. Every document ends with the
end-of-text id. Without flags it prepares the text that ships with Python itself, about 12 MB (Debian's packages hold a
bit less): no download, no account, under a minute. The same command a second time finds its work done."""

EXAMPLES = """\
  python data_prep/preprocess.py
  python data_prep/preprocess.py --input books/ --tokenizer train --vocab_size 16384
  python data_prep/preprocess.py --input notes.txt web.jsonl --text_key content --output_dir data/mine
  python data_prep/download_data.py tinystories && python data_prep/preprocess.py --dataset tinystories"""


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare what the command line asks for."""
    prepare(parse_options(argv, description=DESCRIPTION, examples=EXAMPLES, small=False))


if __name__ == "__main__":
    run_script(main, kept=KEPT)
