"""A server in its own process, as users start it."""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
import openai
from small_run import REPOSITORY

MODEL = "tiny"
POSITIONS = 128
"""Context length of the model."""
BATCH, PLACES = 8, 32
"""Sequences that the servers of the tests decode together, and take at a time."""
START_SEC = 240


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    log: Path
    key: str | None = None
    http: httpx2.Client = field(default_factory=httpx2.Client)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def openai(self) -> openai.OpenAI:
        """The real client; it repeats nothing by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0)

    def complete(self, prompt: Any = "def ", **fields: Any) -> Any:
        """One completion, greedy unless ``fields`` say otherwise."""
        values = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0} | fields
        return self.openai.completions.create(**values)

    def metric(self, line: str) -> float:
        """A figure of ``/metrics``; 0 if it has none yet."""
        text = self.http.get(f"{self.url}/metrics").text
        found = re.search(rf"^{re.escape(line)} (\S+)$", text, flags=re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def ended(self, status: int) -> float:
        """How many requests ended with this status."""
        return self.metric(f'dsgpt_requests_total{{status="{status}"}}')


def within(condition: Any, *, seconds: float = 60) -> None:
    """Wait until ``condition()`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def running(checkpoint: Path, *words: object, log: Path, key: str | None = None) -> Iterator[Server]:
    """A server of ``checkpoint`` on a free port; it is ready, unless the test waits for that itself."""
    command = [sys.executable, REPOSITORY / "src" / "serve.py", "--checkpoint", checkpoint, "--model_name", MODEL]
    environment = {name: value for name, value in os.environ.items() if name != "DSGPT_API_KEY"}
    environment |= {"DSGPT_API_KEY": key} if key else {}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*map(str, command), "--port", "0", "--device", "cpu", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
        )
    try:
        yield Server(process, 0, log, key)
    finally:
        process.kill()
        process.wait()


def ready(server: Server) -> Server:
    """Wait for the line that a server prints when it accepts requests."""
    assert server.process.stdout is not None
    assert select.select([server.process.stdout], [], [], START_SEC)[0], server.log.read_text()
    line = server.process.stdout.readline()
    found = re.search(r"^serving \S+ at http://[^ ]+:(\d+)/v1", line)
    assert found, line + server.log.read_text()
    server.port = int(found.group(1))
    return server
