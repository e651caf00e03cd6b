"""The processes of a contender, seen from the command that measures them."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dsgpt.benchmarks.speed.worker import ANSWER
from dsgpt.benchmarks.speed.workloads import Entry, Row
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.runtime.topology import free_port


class Team:
    """All ranks of a contender. They wait, without using a core, until they are told to take steps.

    Raises:
        UserError: a rank ended; the message has the end of what it printed.
    """

    def __init__(self, row: Row, entry: Entry, *, tokens: Path, folder: Path, peer: Path | None) -> None:
        self._name, self._log = f"{entry.name}, {row.title}", folder / "output.txt"
        self.tokens = row.work.tokens * entry.ranks
        """Of a step of all ranks."""
        self.ranks = entry.ranks
        folder.mkdir(parents=True)
        world_size = 1 if entry.apart else entry.ranks
        port = free_port()
        self._held = contextlib.ExitStack()
        output = self._held.enter_context(self._log.open("ab"))
        self._processes = []
        for rank in range(entry.ranks):
            job = folder / f"rank-{rank}.json"
            own = folder / f"rank-{rank}"
            own.mkdir()
            write_json_atomic(
                job,
                {
                    "kind": entry.kind,
                    "keeps_memory": entry.keeps_memory,
                    "work": row.work.as_dict(),
                    "tokens": str(tokens),
                    "folder": str(own),
                    "peer": str(peer) if peer else None,
                },
            )
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dsgpt.benchmarks.speed.worker", str(job)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    env=_environment(
                        0 if entry.apart else rank,
                        world_size,
                        port=free_port() if entry.apart else port,
                        threads=row.work.threads,
                    ),
                )
            )

    def ready(self) -> None:
        """Wait until every rank has built its model."""
        self._answers()

    def take(self, steps: int) -> dict[str, Any]:
        """Let every rank take ``steps`` steps; returns the answer of the slowest."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = self._answers()
        return max(answers, key=lambda answer: float(answer["seconds"]))

    def _answers(self) -> list[dict[str, Any]]:
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: "subprocess.Popen[str]") -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return answer
        raise UserError(f"{self._name}: ended: {self._log.read_text(encoding='utf-8', errors='replace')[-1500:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._held.close()


def _environment(rank: int, ranks: int, *, port: int, threads: int) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DS_", "OMP_", "MKL_"))}
    kept |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    kept |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return kept | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
