"""The command line of ``decoding``: its help and its flags."""

from pathlib import Path

from dsgpt.benchmarks.decoding.command import PAGE, SIZES, DecodingOptions, run_decoding
from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite

DESCRIPTION = """\
decoding: let this program, transformers and nanoGPT continue the same prompts in turn, with one text and with eight, in
fp32 and bf16, and compare their seconds; measure how far the time of a token is from that of reading the weights. Exit
code 0: every goal was reached, and in fp32 every id is that of transformers; 1: otherwise."""
EXAMPLES = """\
examples:
  .venv/bin/python src/benchmark.py decoding
  .venv/bin/python src/benchmark.py decoding --only fp32 --rounds 9
  .venv/bin/python src/benchmark.py decoding --checkpoint checkpoint/demo-zero1 --data data/python-stdlib/val.bin
  .venv/bin/python src/benchmark.py decoding --model_size demo --peer nanogpt=/tmp/nanoGPT"""


def _add_flags(flags: SuiteFlags) -> None:
    flags.parser.add_argument(
        "--model_size",
        type=flags.reader.choice("--model_size", SIZES, "small"),
        default="small",
        metavar="SIZE",
        help=f"{', '.join(SIZES)} (default: small)",
    )
    flags.number("--rounds", default=5, low=1, text="turns of every contender in a row (default: 5)")
    for flag, metavar, text in (
        ("--checkpoint", "DIR", "a trained model: measures what weights in bf16 and in 8 bits lose (needs --data)"),
        ("--data", "FILE", "the token file that it predicts, such as the val.bin of its run"),
    ):
        flags.parser.add_argument(flag, type=Path, default=None, metavar=metavar, help=text)
    flags.peers("a checkout to compare with")
    flags.only("KEY", "rows, by the beginnings of their keys")
    flags.device("cpu or cuda")


SUITE = Suite(
    description=DESCRIPTION,
    examples=EXAMPLES,
    add_flags=_add_flags,
    options=DecodingOptions,
    run=run_decoding,
    page=PAGE,
)
