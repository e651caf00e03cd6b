"""Measure what the strategies do: ``python src/benchmark.py parity`` shows that all of them train the same model."""

import argparse
import sys
from pathlib import Path

from dsgpt.cli_reader import Parser, Reader, read_words
from dsgpt.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from dsgpt.parity.command import ParityOptions, make_page, run_parity
from dsgpt.parity.matrix import STRATEGIES

REPOSITORY = Path(__file__).resolve().parent.parent
DESCRIPTION = """\
parity: train the same small model under every strategy, at 1, 2, 4 and 8 ranks, with and without accumulation, with
AdamW and SGD, in fp32 and bf16, and compare every step with plain PyTorch; then plant known bugs and show that each one
is caught. Exit code 0: all are equal and all bugs were caught; 1: not so."""
EXAMPLES = f"""\
examples:
  python src/benchmark.py parity
  python src/benchmark.py parity --core
  python src/benchmark.py parity --only zero1 zero3 --ranks 2
  python src/benchmark.py parity --table-from checkpoint/parity/parity.json

strategies: {", ".join(STRATEGIES)}"""


def main() -> int:
    """Read the flags and run; the exit code comes back."""
    try:
        reader = Reader()
        parser = _build_parser(reader)
        flags = read_words(parser, reader, sys.argv[1:], elsewhere={})
        reader.problems.raise_if_any()
        page = flags.page or (flags.table_from or flags.output).with_suffix(".md")
        if flags.table_from:
            make_page(flags.table_from, page)
            print(page)
            return EXIT_DONE
        options = ParityOptions(
            ranks=flags.ranks or (),
            only=flags.only or (),
            core=flags.core,
            output=flags.output,
            page=page,
            keep=flags.keep,
            device=flags.device,
        )
        return run_parity(options, repository=REPOSITORY)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_USER_ERROR


def _build_parser(reader: Reader) -> Parser:
    parser = Parser(
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=("parity",), help="what to measure")
    parser.add_argument(
        "--ranks",
        type=reader.whole("--ranks", low=1),
        nargs="+",
        metavar="N",
        help="only these numbers of processes (default: 1, 2, 4 and 8)",
    )
    parser.add_argument("--only", nargs="+", metavar="STRATEGY", help="only these strategies (default: all)")
    parser.add_argument(
        "--core", action="store_true", help="only what `make test` runs: each strategy in a few trainings"
    )
    parser.add_argument(
        "--device",
        type=reader.choice("--device", ("cpu", "cuda"), "cpu"),
        default="cpu",
        metavar="KIND",
        help="cpu, where every machine can run everything, or cuda with a GPU for each rank (default: cpu)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("checkpoint/parity/parity.json"),
        metavar="RECORD",
        help="the record to write (default: checkpoint/parity/parity.json)",
    )
    parser.add_argument("--page", type=Path, metavar="MD", help="the page to write (default: beside the record)")
    parser.add_argument(
        "--table-from", type=Path, metavar="RECORD", help="run nothing; make the page from a record of before"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave recipes, logs and measurements of every training there"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
