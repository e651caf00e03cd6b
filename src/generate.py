"""Sample text from a run: ``python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("``."""

import argparse
from pathlib import Path

from dsgpt.common.command_line import Parser, Reader, read_words
from dsgpt.common.script import run_script
from dsgpt.config.options import DEVICES, WHICH_CHECKPOINT

EXAMPLES = """\
examples:
  python src/generate.py --checkpoint checkpoint/demo-zero1 --prompt "def main("
  python src/generate.py --checkpoint checkpoint/demo-zero1/step-00000200 --prompt "import" --temperature 0"""


def main() -> None:
    """Read the flags, sample, print."""
    reader = Reader()
    options = read_words(_build_parser(reader), reader)
    reader.problems.raise_if_any()
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


def _build_parser(reader: Reader) -> argparse.ArgumentParser:
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
        type=reader.choice("--which", WHICH_CHECKPOINT, "latest"),
        default="latest",
        metavar="{" + ",".join(WHICH_CHECKPOINT) + "}",
        help="checkpoint of a run: the newest, or the one with the lowest validation loss (default: latest)",
    )
    parser.add_argument("--prompt", default="", help="text to continue (default: none, the start of a document)")
    _add_whole_numbers(parser, reader)
    parser.add_argument(
        "--temperature",
        type=reader.number("--temperature"),
        default=0.8,
        metavar="T",
        help="0: always the likeliest token (default: 0.8)",
    )
    parser.add_argument(
        "--device",
        type=reader.choice("--device", DEVICES, "auto"),
        default="auto",
        metavar="{" + ",".join(DEVICES) + "}",
        help="where to compute (default: auto)",
    )
    return parser


def _add_whole_numbers(parser: argparse.ArgumentParser, reader: Reader) -> None:
    wholes = (
        ("--max_new_tokens", 1, 100, "N", "tokens to add"),
        ("--num_samples", 1, 1, "N", "continuations to draw"),
        ("--top_k", 1, 50, "K", "sample from the K likeliest"),
        ("--seed", 0, 1337, "N", "same seed, same text"),
    )
    for flag, low, default, metavar, text in wholes:
        parser.add_argument(
            flag,
            type=reader.whole(flag, low=low),
            default=default,
            metavar=metavar,
            help=f"{text} (default: {default})",
        )


if __name__ == "__main__":
    run_script(main)
