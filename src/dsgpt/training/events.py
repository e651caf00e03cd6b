"""Calls the command of ``--on_event`` when something happens to a run that a person should know."""

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Iterator

from dsgpt.common.errors import Interrupted, NonFiniteError
from dsgpt.config.run_config import RunConfig
from dsgpt.telemetry.console import duration
from dsgpt.telemetry.record import RECORD_FILE
from dsgpt.training.budget import Budget

logger = logging.getLogger(__name__)

COMMAND_SEC = 30
"""Seconds that the command has; then it is killed."""
STALLED_SEC, STALLED_TIMES, POLL_SEC = 300, 3, 1.0
"""A run is stalled if it takes no step for this long and for this many times its longest time between two steps."""


def notify(config: RunConfig, event: str) -> None:
    """Call the command, on rank 0; its failure is one line and changes nothing."""
    command, record = config.options.on_event, config.run_dir / RECORD_FILE
    if not command or config.options.dry_run or not config.topology.is_main:
        return
    words = [*command, event, str(record)]
    try:
        # of its own session, so that Ctrl-C does not end it
        subprocess.run(words, stdin=subprocess.DEVNULL, timeout=COMMAND_SEC, check=True, start_new_session=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(f"--on_event {event}: {error}")


@contextlib.contextmanager
def end_reported(config: RunConfig) -> Iterator[None]:
    """Calls the command when the run inside has ended, and how."""
    event = "failed"
    try:
        yield
        event = "done"
    except NonFiniteError:
        event = "nan"
        raise
    except KeyboardInterrupt as error:
        event = "limit" if isinstance(error, Interrupted) and error.limit else "preempted"
        raise
    finally:
        notify(config, event)


@contextlib.contextmanager
def stalls_reported(config: RunConfig, budget: Budget) -> Iterator[None]:
    """Calls the command, once for each stall, while the run inside takes no step."""
    ended = threading.Event()

    def watch() -> None:
        told: float | None = None
        while not ended.wait(POLL_SEC):
            last, longest = budget.progressed, max(STALLED_SEC, STALLED_TIMES * budget.longest_sec)
            if last is not None and last != told and time.monotonic() - last > longest:
                told = last
                logger.warning(f"no step for {duration(longest)}")
                notify(config, "stalled")

    thread = threading.Thread(target=watch, name="stalls", daemon=True)
    if config.topology.is_main:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()  # a command that runs has a time limit, and hears of the end after it
