"""Sample text from a run: ``python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("``."""

import argparse
from pathlib import Path

from dsgpt.common.command_line import Parser, path_problems
from dsgpt.common.errors import UserError
from dsgpt.common.script import run_script
from dsgpt.config.options import WHICH_CHECKPOINT

EXAMPLES = """\
examples:
  python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("
  python src/generate.py --checkpoint checkpoint/demo-zero1/step-00000200 --prompt "import" --temperature 0"""


def main() -> None:
    """Read the flags, sample, print."""
    parser = _build_parser()
    options = parser.parse_args()
    if problems := path_problems(parser, options):
        raise UserError(*problems)
    from dsgpt.inference.sample import sample  # noqa: PLC0415 - torch takes seconds; --help should not

    for text in sample(
        options.checkpoint,
        which=options.which,
        prompt=options.prompt,
        samples=options.num_samples,
        new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        device_kind=options.device,
    ):
        print(text)
        print("-" * 80)


def _build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="Continue a prompt with the model of a run, whichever strategy trained it.",
        epilog=EXAMPLES,
        allow_abbrev=True,
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="run folder, or one checkpoint in it"
    )
    parser.add_argument(
        "--which",
        choices=WHICH_CHECKPOINT,
        default="latest",
        help="checkpoint of a run: the newest, or the one with the lowest validation loss (default: latest)",
    )
    parser.add_argument("--prompt", default="", help="text to continue (default: none, the start of a document)")
    parser.add_argument("--max_new_tokens", type=int, default=100, metavar="N", help="tokens to add (default: 100)")
    parser.add_argument("--num_samples", type=int, default=1, metavar="N", help="continuations to draw (default: 1)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top_k", type=int, default=50, metavar="K", help="sample from the K likeliest (default: 50)")
    parser.add_argument("--seed", type=int, default=1337, metavar="N", help="same seed, same text (default: 1337)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (default: auto)"
    )
    return parser


if __name__ == "__main__":
    run_script(main)
