"""A training process from its command line to its exit code."""

import contextlib
import errno
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dsgpt.common import errors
from dsgpt.common.command_line import complain
from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import resolve
from dsgpt.data.token_file import TokenFileError
from dsgpt.machine.launcher import Interruption, Launcher, waiting_processes
from dsgpt.machine.topology import read_topology

LIMIT_MARK = "DSGPT_LIMIT_MARK"
"""An environment variable: a file to make if a limit of the user ends the run, which no script should start again."""
WATCHED_LAUNCHERS = ("deepspeed", "torchrun")
"""Launchers whose exit stops the run. A process started from a shell may outlive the shell."""
_DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT}
PATIENCE_SEC = 10
"""Seconds other ranks wait before they print the error themselves. The launcher usually ends them first."""


def train(arguments: Sequence[str]) -> int:  # noqa: PLR0911 - one for each kind of end
    """Run ``src/gpt2.py`` with ``arguments``; returns the exit code."""
    _find_tools_beside_interpreter()
    speaks = True
    try:
        topology = read_topology()
        speaks = topology.is_main
        launcher = Launcher() if topology.launcher in WATCHED_LAUNCHERS else None
        with Interruption(launcher, speaks=speaks) as interruption:
            return _train(arguments, interruption, speaks=speaks)
    except TokenFileError as error:  # while reading; a data worker puts its traceback before the message
        return _complain([str(error).rsplit("TokenFileError: ", 1)[-1].strip()], errors.EXIT_USER_ERROR, speaks=True)
    except errors.UserError as error:
        return _complain(error.problems, errors.EXIT_USER_ERROR, speaks=speaks)
    except errors.LostRank as error:
        return complain_of(error)
    except (errors.NonFiniteError, errors.InvariantError, errors.OutOfMemory, errors.SaveError) as error:
        return _complain([str(error)], error.exit_code, speaks=speaks)
    except OSError as error:
        if error.errno not in _DISK_IS_FULL:
            raise
        return _complain([f"{error}: free space, then continue with --resume"], errors.EXIT_NOT_SAVED, speaks=True)
    except KeyboardInterrupt as error:
        return _interrupted(error, speaks=speaks)


def check(arguments: Sequence[str]) -> None:
    """Do a dry run with ``arguments``, without output.

    Raises:
        DifferentRunError: the run folder holds a run with other settings, and nothing else is wrong.
        UserError: something else is wrong.
        OSError: the system refuses something, perhaps temporarily.
        KeyboardInterrupt: it was interrupted.
    """
    _find_tools_beside_interpreter()
    with Interruption(speaks=False) as interruption:
        _train([*arguments, "--dry_run"], interruption, speaks=False)


def _train(arguments: Sequence[str], interruption: Interruption, *, speaks: bool) -> int:
    options, problems = parse_arguments(arguments)
    topology = read_topology(local_rank_flag=options.local_rank)
    others_wait = topology.local_world_size < topology.world_size and not options.dry_run
    if others_wait:
        from dsgpt.machine.console import Progress  # noqa: PLC0415 - as below
        from dsgpt.machine.peers import say_busy, tell_refusal  # noqa: PLC0415 - imports torch

        Progress.heard = say_busy(topology)
    try:
        config = resolve(options, topology=topology, problems=problems)
    except errors.UserError as error:
        if others_wait:
            _tell_torchrun(error.problems)
            if topology.local_rank == 0:  # at once, because rank 0 may be long in coming
                complain(error.problems, errors.EXIT_USER_ERROR)
            tell_refusal(topology, error.problems)
            return errors.EXIT_USER_ERROR
        raise
    from dsgpt.machine.console import logging_to_console  # noqa: PLC0415 - torch takes seconds; --help should not
    from dsgpt.training.budget import end_reported  # noqa: PLC0415
    from dsgpt.training.run import run  # noqa: PLC0415

    with logging_to_console(speaks=speaks), interruption.patience(), end_reported(config), interruption.patience(False):
        run(config, interruption)
    return errors.EXIT_DONE


def _find_tools_beside_interpreter() -> None:
    """Put the environment's bin folder, which holds ninja, on PATH: the environment may not be activated."""
    beside = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if beside not in folders:
        os.environ["PATH"] = os.pathsep.join([beside, *folders])


def complain_of(error: errors.LostRank) -> int:
    """Print who is at fault, if this rank is to, and tell torchrun; returns the exit code. Stacks have no prefix."""
    first, *stacks = str(error).splitlines()
    _tell_torchrun([first])
    if error.speaks:
        complain([first], error.exit_code)
        with contextlib.suppress(OSError):  # of a terminal that is gone
            print(*stacks, sep="\n", file=sys.stderr, flush=True)
    return error.exit_code


def _complain(lines: Sequence[str], code: int, *, speaks: bool) -> int:
    """Print each line; returns ``code``.

    All ranks usually fail with the same error. Rank 0 prints it at once; another rank, only if it still runs after
    ``PATIENCE_SEC``.
    """
    if not speaks:
        time.sleep(PATIENCE_SEC)
    _tell_torchrun(lines)
    return complain(lines, code)


def _tell_torchrun(lines: Sequence[str]) -> None:
    """Put the error into the summary with which torchrun ends, in the form of its ``ErrorHandler``."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        facts = {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the exit code and the line on stderr remain
            Path(file).write_text(json.dumps({"message": {"message": lines[0], "extraInfo": facts}}), encoding="utf-8")


def _interrupted(error: KeyboardInterrupt, *, speaks: bool) -> int:
    if not isinstance(error, errors.Interrupted):
        return _complain(["interrupted; continue with --resume"], errors.EXIT_INTERRUPTED, speaks=speaks)
    line = f"{error}; continue with --resume"
    _tell_torchrun([line])
    if error.limit and speaks and (mark := os.environ.get(LIMIT_MARK)):
        Path(mark).touch()
    if error.limit and "TORCHELASTIC_RUN_ID" in os.environ and os.environ["LOCAL_RANK"] == "0":
        os.kill(waiting_processes()[-1].pid, signal.SIGTERM)  # else it starts the ranks again, with the limit anew
    if speaks and not error.together:  # else the run has printed and logged it
        with contextlib.suppress(OSError):  # of a terminal that is gone
            print(line, file=sys.stderr, flush=True)
    return errors.EXIT_STOPPED
