"""Serve a model with OpenAI's completions: ``.venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1``."""

from pathlib import Path

from dsgpt.common.command_line import Parser, Reader, read_words, run_script
from dsgpt.config.options import DEVICES, WHICH_CHECKPOINT
from dsgpt.inference.server.options import API_KEY, Limits, ServeOptions, check_packages

DESCRIPTION = """\
Answer requests for completions over HTTP, as OpenAI's interface does: /v1/completions, /v1/models, /health, and
/metrics for Prometheus. Nothing that a request says is logged."""
EXAMPLES = f"""\
examples:
  .venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{{"model": "demo-zero1", "prompt": "def main(", "max_tokens": 32}}'
  {API_KEY}=$(openssl rand -hex 32) .venv/bin/python src/serve.py --checkpoint checkpoint/demo-zero1 --host 0.0.0.0"""


def main() -> int:
    """Read the flags, and serve until a signal."""
    reader = Reader()
    flags = read_words(_build_parser(reader), reader)
    if flags.checkpoint is None and not reader.problems.mention("--checkpoint"):
        reader.problems.add("--checkpoint is missing: give a run folder such as checkpoint/demo-zero1")
    check_packages(reader.problems)
    reader.problems.raise_if_any()
    limits = Limits(
        batch=flags.max_batch,
        queue=flags.max_queue,
        new_tokens=flags.max_tokens,
        body_bytes=flags.max_body_bytes,
        request_sec=flags.request_timeout,
        stall_sec=flags.stall_timeout,
    )
    from dsgpt.inference.server.server import serve  # noqa: PLC0415 - torch takes seconds; --help should not

    return serve(
        ServeOptions(
            checkpoint=flags.checkpoint,
            which=flags.which,
            model_name=flags.model_name,
            host=flags.host,
            port=flags.port,
            api_key_file=flags.api_key_file,
            device=flags.device,
            limits=limits,
        )
    )


def _build_parser(reader: Reader) -> Parser:
    parser = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="run folder, one checkpoint in it, a portable folder, or a Hugging Face folder of a GPT-2",
    )
    for flag, allowed, text in (
        ("--which", WHICH_CHECKPOINT, "checkpoint of a run: the newest, or the one with the lowest validation loss"),
        ("--device", DEVICES, "where to compute"),
    ):
        parser.add_argument(
            flag,
            type=reader.choice(flag, allowed, allowed[0]),
            default=allowed[0],
            metavar="{" + ",".join(allowed) + "}",
            help=f"{text} (default: {allowed[0]})",
        )
    parser.add_argument("--model_name", metavar="NAME", help="the model's name in requests (default: the folder's)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    parser.add_argument(
        "--api_key_file",
        type=Path,
        metavar="FILE",
        help="holds the key that requests must bring, or several: NAME KEY [REQUESTS_PER_MINUTE] a line (default: "
        f"{API_KEY} of the environment, if it is set)",
    )
    _add_numbers(parser, reader)
    return parser


def _add_numbers(parser: Parser, reader: Reader) -> None:
    for flag, low, default, text in (
        ("--port", 0, 8000, "0 for any free port"),
        ("--max_batch", 1, 8, "sequences decoded together"),
        ("--max_queue", 0, 64, "sequences that may wait; further ones are refused with 429"),
        ("--max_tokens", 1, None, "the most tokens of a completion"),
        ("--max_body_bytes", 1, 262_144, "the largest request"),
        ("--request_timeout", 1, 120, "seconds from a request to the end of its answer"),
        ("--stall_timeout", 1, 20, "seconds in which a client sends its request, or takes a part of the answer"),
    ):
        shown = "the model's context length" if default is None else f"{default:,}"
        parser.add_argument(
            flag, type=reader.whole(flag, low=low), default=default, metavar="N", help=f"{text} (default: {shown})"
        )


if __name__ == "__main__":
    run_script(main)
