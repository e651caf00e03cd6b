"""A server in a process of its own, and its memory."""

import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import psutil

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import clipped_text

MODEL = "served"
START_SEC, STOP_SEC = 120, 60
SAMPLE_SEC = 0.1


class ServerProcess:
    """Starts ``src/serve.py`` and waits until it accepts requests; a context manager, which stops it at its end.

    Args:
        repository: has the script.
        checkpoint: what to serve.
        batch: as ``--max_batch``.
        queue: as ``--max_queue``.
        device: as ``--device``.
        log: gets what it prints to standard error.

    Raises:
        UserError: it does not start.
    """

    def __init__(self, repository: Path, checkpoint: Path, *, batch: int, queue: int, device: str, log: Path) -> None:
        words = ["--checkpoint", checkpoint, "--model_name", MODEL, "--port", 0, "--device", device]
        words += ["--max_batch", batch, "--max_queue", queue]
        command = [sys.executable, str(repository / "src" / "serve.py"), *map(str, words)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        assert self._process.stdout is not None
        ready = select.select([self._process.stdout], [], [], START_SEC)[0]
        found = re.search(r"http://\S+:\d+", self._process.stdout.readline()) if ready else None
        if found is None:
            self._process.kill()
            self._process.communicate()
            printed = log.read_text(encoding="utf-8", errors="replace").strip() or "it printed nothing"
            raise UserError(f"src/serve.py did not start: {clipped_text(printed.splitlines()[-1], width=300)}")
        self.url = found[0]
        self._peak, self._done = 0, threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._sampler.join()
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def stop(self) -> int | None:
        """End it with SIGTERM; returns its exit code, None if it does not end within ``STOP_SEC``."""
        self._done.set()
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=STOP_SEC)
        except subprocess.TimeoutExpired:
            return None

    def peak_bytes(self) -> int:
        """The most resident memory since the last call."""
        peak, self._peak = self._peak, 0
        return peak

    def metric(self, line: str) -> float:
        """A figure of ``/metrics``; 0 if it has none yet, or if the server does not answer."""
        try:
            text = httpx2.get(f"{self.url}/metrics").text
        except httpx2.HTTPError:
            return 0.0
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, flags=re.MULTILINE)
        return float(found[1]) if found else 0.0

    def _sample(self) -> None:
        process = psutil.Process(self._process.pid)
        while not self._done.wait(SAMPLE_SEC):
            try:
                self._peak = max(self._peak, process.memory_info().rss)
            except psutil.NoSuchProcess:
                return
