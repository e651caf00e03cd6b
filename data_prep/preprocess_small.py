"""Turn the first documents of a text into small token files; see --help."""

from collections.abc import Sequence

from dsgpt.common.script import run_script
from dsgpt.prepare.console import KEPT
from dsgpt.prepare.options import parse_options
from dsgpt.prepare.preparation import prepare

DESCRIPTION = """\
As preprocess.py with the same flags, but for the first N documents only: train_small.bin and val_small.bin, for a quick
look. Of the N, --val_fraction (at least one) are the first of the validation documents, the others the first of the
training documents. Small and full files share the folder and its tokenizer/, which `--tokenizer train` trains on the
whole train split in both cases, so a model trained on one can be evaluated on the other."""

EXAMPLES = """\
  python data_prep/preprocess_small.py --num_documents 100
  python data_prep/preprocess_small.py --num_documents 1000 --dataset tinystories"""


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare what the command line asks for."""
    prepare(parse_options(argv, description=DESCRIPTION, examples=EXAMPLES, small=True))


if __name__ == "__main__":
    run_script(main, kept=KEPT)
