"""The process of an engine, seen from the command that measures it."""

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsgpt.benchmarks.inference.protocol import Answer, Request, as_words
from dsgpt.benchmarks.inference.worker import ANSWER
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import clipped_text

PACKAGES = Path(__file__).resolve().parents[3]
"""The folder that ``dsgpt`` is in: vLLM's environment does not have it installed."""
LONGEST_SEC, ENDING_SEC = 3600, 60
"""For an answer, and for the end of an engine; then it is killed."""


class EngineProcess:
    """An engine that waits, without using a core, until it is told to serve a turn.

    Args:
        python: the interpreter.
        job: see ``worker.open_engine``.
        folder: new, for the job and the engine's output.

    Raises:
        UserError: the process ended; the message has the last line that it printed. All methods raise it.
    """

    def __init__(self, python: Path, job: dict[str, Any], folder: Path) -> None:
        self._log = folder / "output.txt"
        self.peak_bytes: int | None = None
        folder.mkdir(parents=True)
        write_json_atomic(folder / "job.json", job)
        self._held = contextlib.ExitStack()
        output = self._held.enter_context(self._log.open("ab"))
        self._process = subprocess.Popen(
            [str(python), "-m", "dsgpt.benchmarks.inference.worker", str(folder / "job.json")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=_environment(job["threads"]),
        )
        self.facts: dict[str, Any] = {}
        """Seconds to load, and the version of its library."""

    def ready(self) -> None:
        """Wait until it has loaded the model."""
        self.facts = self._read()

    def serve(self, requests: Sequence[Request], *, slots: int) -> list[Answer]:
        """Serve a turn; the answers in the order of ``requests``."""
        found = self._ask({"requests": as_words(requests), "slots": slots})
        self.peak_bytes = found["peak_bytes"]
        answers = {one["number"]: Answer(**one) for one in found["answers"]}
        return [answers[request.number] for request in requests]

    def margins(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """By how much the likeliest id leads, by this project's model, at each id that continues a prompt."""
        found: list[list[float]] = self._ask({"margins": [{"prompt": one, "ids": two} for one, two in texts]})[
            "margins"
        ]
        return found

    def _ask(self, turn: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``_read`` says why it ended
            self._process.stdin.write(json.dumps(turn) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(LONGEST_SEC, self._process.kill)
        watch.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                    return answer
        finally:
            watch.cancel()
        raise UserError(f"its process ended with {self._process.wait()}: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
        return clipped_text(lines[-1], width=200) or "it printed nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=ENDING_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._held.close()


def _environment(threads: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_", "MKL_"))}
    kept |= {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
    return kept | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
