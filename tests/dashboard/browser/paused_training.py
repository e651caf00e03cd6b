"""A real training that waits after some steps, so that what is seen of it does not depend on its speed."""

import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dashboard_server import REPOSITORY

from dsgpt.machine.launcher import launcher_command

SCRIPT = str(REPOSITORY / "src" / "gpt2.py")


@contextmanager
def paused(words: Sequence[str], *, after: int) -> Iterator[subprocess.Popen[str]]:
    """Train with the flags ``words``, of which one prints every step, and stop the process after some steps."""
    command = [*launcher_command("python", 1), SCRIPT, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            lines = []
            for line in run.stdout:
                lines.append(line)
                if re.match(rf"step +{after}/", line):
                    break
            else:
                raise AssertionError("".join(lines))
            run.send_signal(signal.SIGSTOP)
            yield run
        finally:
            run.kill()
