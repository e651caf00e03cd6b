"""What happens around every training process: reading the request, and turning its end into an exit code."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dsgpt.cli import parse_arguments
from dsgpt.config import resolve
from dsgpt.data.token_file import TokenFileError
from dsgpt.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_NON_FINITE, EXIT_USER_ERROR, NonFiniteError, UserError
from dsgpt.topology import read_topology

PATIENCE_SEC = 10
"""How long another rank leaves the word to rank 0, whose launcher usually ends it meanwhile."""


def train(arguments: Sequence[str]) -> int:
    """Run ``src/gpt2.py`` with ``arguments``; the exit code comes back."""
    _find_tools_beside_interpreter()
    speaks = True
    try:
        speaks = read_topology().is_main
        options, problems = parse_arguments(arguments)
        topology = read_topology(local_rank_flag=options.local_rank)
        config = resolve(options, topology=topology, problems=problems)
        from dsgpt.telemetry.console import Console  # noqa: PLC0415 - torch and tqdm take seconds; --help should not
        from dsgpt.training.run import run  # noqa: PLC0415

        console = Console(speaks=speaks)
        run(config, console)
    except UserError as error:
        _complain(error.problems, speaks=speaks)
        return EXIT_USER_ERROR
    except TokenFileError as error:  # found while reading; a worker process puts its traceback before the message
        _complain([str(error).rsplit("TokenFileError: ", 1)[-1].strip()], speaks=True)
        return EXIT_USER_ERROR
    except NonFiniteError as error:
        _complain([str(error)], speaks=speaks)
        return EXIT_NON_FINITE
    except KeyboardInterrupt:
        _complain(["interrupted; continue with --resume"], speaks=speaks)
        return EXIT_INTERRUPTED
    return EXIT_DONE


def leave(code: int) -> NoReturn:
    """End this process at once, after everything it wrote is out.

    At an ordinary exit a thread of gloo may still run while C++ takes its objects apart, which aborts the process: a
    finished run of two ranks then ended with signal 6, once in about a hundred launches.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _find_tools_beside_interpreter() -> None:
    """Put the environment's bin folder on PATH: it holds ninja, also when nobody activated the environment."""
    beside = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if beside not in folders:
        os.environ["PATH"] = os.pathsep.join([beside, *folders])


def _complain(lines: Sequence[str], *, speaks: bool) -> None:
    """Print each line once. Ranks see the same mistake together, so the others speak only if rank 0 does not."""
    if not speaks:
        time.sleep(PATIENCE_SEC)
    for line in lines:
        print(f"error: {line}", file=sys.stderr, flush=True)
