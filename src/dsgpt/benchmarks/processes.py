"""Processes that suites start besides ranks: workers that answer lines, and trainings of the product."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import psutil

from dsgpt.benchmarks.launch import environment_for
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import clipped_text, read_object
from dsgpt.machine.launcher import launcher_command
from dsgpt.model.config import SHAPE_FLAGS, GPT2Config
from dsgpt.record.schema import RECORD_FILE

LONGEST_ANSWER_SEC, ENDING_SEC = 3600, 60
"""For an answer of a process, and for its end; then it is killed."""
MARK = "answer "
"""Stands before each answer. Other lines of the output are those of libraries."""


LEAVE_SEC = 5.0
"""Seconds between SIGTERM and SIGKILL for the processes of a training."""


class WorkerEnded(UserError):
    """A process ended instead of answering. The message has the last line that it printed, ``output`` has all."""

    def __init__(self, code: int, output: str) -> None:
        last = clipped_text(output.strip().split("\n")[-1], width=200) or "it printed nothing"
        super().__init__(f"its process ended with {code}: {last}")
        self.output = output


class LineWorker:
    """A process that waits, without using a core, until it is sent a line of JSON, and answers with one.

    A context manager, which ends it. ``read`` raises ``WorkerEnded`` if it ended before.

    Args:
        module: what it runs, with the job's file as argument; an empty input must end it.
        job: what it is to do. It also gets the key ``mark``: what must stand before each answer.
        folder: new, for the job and what the process prints.
        threads: its CPU threads; 0 for as many as the machine gives.
        variables: further variables of its environment.
        python: its interpreter.
    """

    def __init__(
        self,
        module: str,
        job: Mapping[str, Any],
        folder: Path,
        *,
        threads: int,
        variables: Mapping[str, object] | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        self._log = folder / "output.txt"
        folder.mkdir(parents=True)
        write_json_atomic(folder / "job.json", {**job, "mark": MARK})
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_", "MKL_"))}
        environment |= {key: str(value) for key, value in (variables or {}).items()}
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", module, str(folder / "job.json")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
            )

    def send(self, question: object) -> None:
        """Ask for an answer, which ``read`` returns."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``read`` says why it ended
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next answer, when it is there."""
        assert self._process.stdout is not None
        watch = threading.Timer(LONGEST_ANSWER_SEC, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith(MARK):
                    answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                    return answer
        finally:
            watch.cancel()
        raise WorkerEnded(self._process.wait(), self._log.read_text(encoding="utf-8", errors="replace"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=ENDING_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def own_group(
    command: Sequence[str], output: BinaryIO, *, cwd: Path, device: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """The running command; at the end of the context none of its processes is left.

    ``torchrun`` gives each worker a session of its own, so they are found by their parents.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment_for(device),
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            family = [psutil.Process(process.pid)]
            with contextlib.suppress(psutil.NoSuchProcess):
                family += family[0].children(recursive=True)
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.terminate()
            for one in psutil.wait_procs(family, timeout=LEAVE_SEC)[1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def training_words(values: Mapping[str, object]) -> list[str]:
    """Flags of ``src/gpt2.py`` with their values; True is a switch."""
    return list(
        itertools.chain.from_iterable(
            [f"--{name}"] if value is True else [f"--{name}", str(value)] for name, value in values.items()
        )
    )


def shape_values(config: GPT2Config) -> dict[str, object]:
    """The flags of the shape of a model, for ``training_words``."""
    return {name.removeprefix("--"): getattr(config, field) for field, name in SHAPE_FLAGS.items()}


def train(values: Mapping[str, object], *, repository: Path, what: str) -> dict[str, Any]:
    """Train in a process of its own, in ``values["checkpoint_path"]``; return the record.

    Raises:
        UserError: it failed: ``what`` and the end of its errors.
    """
    command = [*launcher_command("python", 1), str(repository / "src" / "gpt2.py"), *training_words(values)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{what} failed: {done.stderr.strip()[-1500:]}")
    return read_object(Path(str(values["checkpoint_path"])) / RECORD_FILE)
