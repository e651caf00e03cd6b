"""The command line of ``inference``: its help and its flags."""

from pathlib import Path

from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.suite import Suite
from dsgpt.benchmarks.inference.command import (
    CHECKPOINT,
    CONCURRENCY,
    DEFAULT_ENGINES,
    PAGE,
    REPEATS,
    VLLM_ENVIRONMENT,
    InferenceOptions,
    run_inference,
)
from dsgpt.benchmarks.inference.trace import COMMITTED
from dsgpt.benchmarks.inference.worker import ENGINES

PEERS = "--peers"
"""Turns the command into that of ``decoding``."""
DESCRIPTION = """\
inference: let engines answer the same requests, which arrive at random instants, with 1, 2, 4, 8 and 16 of them at
once: this project one at a time and in static batches, transformers' continuous batching, and vLLM. Compare time to the
first token, time per token, latency, queue time, throughput and memory, and every token. The run of the checkpoint gets
the figures, too. Exit code 0: all engines generated the same tokens; 1: otherwise, and if one
failed, without which the others go on."""
EXAMPLES = """\
examples:
  .venv/bin/python src/benchmark.py inference --checkpoint checkpoint/demo-zero1
  .venv/bin/python src/benchmark.py inference --concurrency 1,2,4,8,16 --engines one,static,continuous,vllm
  .venv/bin/python src/benchmark.py inference --concurrency 1,8 --engines one,continuous --repeats 1 --requests 16
  .venv/bin/python src/benchmark.py inference --peers --peer nanogpt=/tmp/nanoGPT

`make vllm` installs vLLM into .venv-vllm."""


def _add_flags(flags: SuiteFlags) -> None:
    add, read = flags.parser.add_argument, flags.reader
    slots, engines = ",".join(map(str, CONCURRENCY)), ",".join(DEFAULT_ENGINES)
    add(
        "--checkpoint",
        type=Path,
        default=CHECKPOINT,
        metavar="DIR",
        help=f"run folder, checkpoint or portable folder (default: {CHECKPOINT})",
    )
    add(
        "--concurrency",
        type=read.wholes("--concurrency", low=1),
        default=CONCURRENCY,
        metavar="LIST",
        help=f"requests that an engine works on at once, at most (default: {slots})",
    )
    add(
        "--engines",
        type=read.choices("--engines", ENGINES),
        default=DEFAULT_ENGINES,
        metavar="LIST",
        help=f"some of {', '.join(ENGINES)} (default: {engines})",
    )
    flags.number("--repeats", default=REPEATS, low=1, text=f"turns of each engine and concurrency (default: {REPEATS})")
    flags.number("--requests", default=0, text="only the first N requests of the trace; 0 for all (default)")
    add("--trace", type=Path, default=COMMITTED, metavar="FILE", help="the requests (default: the committed ones)")
    environment = VLLM_ENVIRONMENT
    add(
        "--vllm",
        type=Path,
        default=environment,
        metavar="DIR",
        help=f"the environment with vLLM, which `make vllm` makes (default: {environment})",
    )
    flags.device("cpu or cuda")
    add(
        PEERS,
        action="store_true",
        help="compare one request at a time with transformers and nanoGPT instead: the same as `decoding`, whose flags "
        "it takes",
    )


SUITE = Suite(
    description=DESCRIPTION,
    examples=EXAMPLES,
    add_flags=_add_flags,
    options=InferenceOptions,
    run=run_inference,
    page=PAGE,
)
