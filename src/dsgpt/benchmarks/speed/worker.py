"""A rank of a contender: ``python -m dsgpt.benchmarks.speed.worker JOB``, which takes steps when told to.

Each line of the input is a number of steps; the answer is a line of JSON. An empty input ends the process.
"""

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.speed.workloads import work_from

ANSWER = "answer "
"""Before each answer; other lines are output of libraries."""


def main() -> None:
    """Build the contender, then serve."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import torch  # noqa: PLC0415

    from dsgpt.benchmarks.speed.trainers import open_trainer  # noqa: PLC0415
    from dsgpt.runtime.host_memory import keep_freed_memory  # noqa: PLC0415

    if job["keeps_memory"]:
        keep_freed_memory()
    torch.manual_seed(0)
    work, peer = work_from(job["work"]), job["peer"]
    folder = Path(job["folder"])
    trainer = open_trainer(
        job["kind"], work, tokens=Path(job["tokens"]), folder=folder, peer=Path(peer) if peer else None
    )
    _answer({"ready": True})
    for line in sys.stdin:
        started, loss = time.perf_counter(), torch.zeros(())
        with synchronisations(work.device) as waits:
            for _ in range(int(line)):
                loss = trainer.step()
        value = float(loss)  # waits for the device
        _answer(
            {
                "seconds": time.perf_counter() - started,
                "loss": value,
                "peak_bytes": _peak_bytes(work.device),
                "synchronisations": None if work.device == "cpu" else len(waits),
            }
        )


@contextlib.contextmanager
def synchronisations(device: str) -> Iterator[list[str]]:
    """Collects a message for every time that Python waits for the GPU inside; on a CPU there is nothing to wait for."""
    found: list[str] = []
    if device == "cpu":
        yield found
        return
    import torch  # noqa: PLC0415

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [str(warning.message) for warning in caught if "synchronizing CUDA operation" in str(warning.message)]


def _peak_bytes(device: str) -> int:
    """The most memory that this process had: of its GPU, or resident in the host."""
    if device == "cuda":
        import torch  # noqa: PLC0415

        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    kilobytes: str = status.split("VmHWM:")[1].split()[0]
    return int(kilobytes) * 1024


def _answer(values: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
    from dsgpt.runtime.leaving import leave

    leave(0)
