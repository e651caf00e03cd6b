"""What happens around every training process: reading the request, and turning its end into an exit code."""

import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from dsgpt.common.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NOT_SAVED,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    Interrupted,
    NonFiniteError,
    SaveError,
    UserError,
)
from dsgpt.common.script import complain
from dsgpt.config.flags import parse_arguments
from dsgpt.config.run_config import resolve
from dsgpt.data.token_file import TokenFileError
from dsgpt.runtime.interruption import Interruption
from dsgpt.runtime.launcher import Launcher
from dsgpt.runtime.topology import read_topology

WATCHED_LAUNCHERS = ("deepspeed", "torchrun")
"""Whose end ends the run; a process that a shell started alone may well outlive the shell."""
_DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT}
PATIENCE_SEC = 10
"""How long another rank leaves the word to rank 0, whose launcher usually ends it meanwhile."""


def train(arguments: Sequence[str]) -> int:
    """Run ``src/gpt2.py`` with ``arguments``; the exit code comes back."""
    _find_tools_beside_interpreter()
    speaks = True
    try:
        topology = read_topology()
        speaks = topology.is_main
        launcher = Launcher() if topology.launcher in WATCHED_LAUNCHERS else None
        with Interruption(launcher, speaks=speaks) as interruption:
            _train(arguments, speaks, interruption)
    except TokenFileError as error:  # found while reading; a worker process puts its traceback before the message
        line = str(error).rsplit("TokenFileError: ", 1)[-1].strip()
        return _complain([line], EXIT_USER_ERROR, speaks=True)
    except UserError as error:
        return _complain(error.problems, EXIT_USER_ERROR, speaks=speaks)
    except (NonFiniteError, SaveError) as error:
        return _complain([str(error)], error.exit_code, speaks=speaks)
    except OSError as error:
        if error.errno not in _DISK_IS_FULL:
            raise
        return _complain([f"{error}: make room, then continue with --resume"], EXIT_NOT_SAVED, speaks=True)
    except KeyboardInterrupt as error:
        return _interrupted(error, speaks=speaks)
    return EXIT_DONE


def check(arguments: Sequence[str]) -> None:
    """Do the dry run of ``arguments`` in silence, and raise what ``train`` would make an exit code of.

    Raises:
        DifferentRunError: nothing is wrong but that the folder's run is another one.
        UserError: something else is.
        OSError: the system refuses, perhaps for now.
        KeyboardInterrupt: somebody ended it.
    """
    _find_tools_beside_interpreter()
    with Interruption(speaks=False) as interruption:
        _train([*arguments, "--dry_run"], False, interruption)


def _train(arguments: Sequence[str], speaks: bool, interruption: Interruption) -> None:
    options, problems = parse_arguments(arguments)
    topology = read_topology(local_rank_flag=options.local_rank)
    config = resolve(options, topology=topology, problems=problems)
    from dsgpt.telemetry.console import Console  # noqa: PLC0415 - torch and tqdm take seconds; --help should not
    from dsgpt.training.run import run  # noqa: PLC0415

    run(config, Console(speaks=speaks), interruption)


def leave(code: int) -> NoReturn:
    """End this process at once, after everything it wrote is out.

    At an ordinary exit a thread of gloo may still run while C++ takes its objects apart, which aborts the process: a
    finished run of two ranks then ended with signal 6, once in about a hundred launches.
    """
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with contextlib.suppress(OSError):  # of a terminal that is gone
            flush()
    os._exit(code)


def _find_tools_beside_interpreter() -> None:
    """Put the environment's bin folder on PATH: it holds ninja, also when nobody activated the environment."""
    beside = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if beside not in folders:
        os.environ["PATH"] = os.pathsep.join([beside, *folders])


def _complain(lines: Sequence[str], code: int, *, speaks: bool) -> int:
    """Print each line once; ``code`` comes back.

    Ranks see the same mistake together, so the others speak only if rank 0 does not.
    """
    if not speaks:
        time.sleep(PATIENCE_SEC)
    return complain(lines, code)


def _interrupted(error: KeyboardInterrupt, *, speaks: bool) -> int:
    if not isinstance(error, Interrupted):
        return _complain(["interrupted; continue with --resume"], EXIT_INTERRUPTED, speaks=speaks)
    if speaks and not error.together:  # what ranks agreed to, the run has told and logged
        with contextlib.suppress(OSError):  # of a terminal that is gone
            print(f"{error}; continue with --resume", file=sys.stderr, flush=True)
    return EXIT_STOPPED
