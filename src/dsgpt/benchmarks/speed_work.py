"""What the speed suite measures, and a rank of a contender.

A rank of a contender: ``python -m dsgpt.benchmarks.speed_work JOB``, which takes steps when told to. Each line of the
input is a number of steps; the answer is a line of JSON. An empty input ends the process.
"""

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import cells as shapes
from dsgpt.model.config import PRESETS, GPT2Config

OURS, ENGINE, DDP = "dsgpt", "dsgpt ZeRO-1", "dsgpt ddp"
NANOGPT, HUGGING_FACE = "nanogpt", "hugging face"
# What the suite measures: models, batches and precisions, and the contenders that take steps on them.

PEERS = (NANOGPT, HUGGING_FACE)


@dataclass(frozen=True, kw_only=True)
class Shape(shapes.Shape):
    """A model and the length of its sequences."""

    length: int
    positions: int = 1024
    """Of which the first ``length`` are used."""

    def flops_per_token(self) -> int:
        """FLOPs of forward and backward pass."""
        model = GPT2Config(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            block_size=self.positions,
            vocab_size=self.vocab_size,
        )
        return model.flops_per_token(self.length)

    def products(self) -> dict[str, tuple[int, int, int]]:
        """The matrix products of a forward pass: outputs and inputs of a token, and how many there are."""
        wide = self.n_embd
        return {
            "qkv": (3 * wide, wide, self.n_layer),
            "proj": (wide, wide, self.n_layer),
            "fc": (4 * wide, wide, self.n_layer),
            "mlp proj": (wide, 4 * wide, self.n_layer),
            "head": (self.vocab_size, wide, 1),
        }


def published(name: str, *, length: int, vocab_size: int | None = None) -> Shape:
    """A preset of ``src/gpt2.py`` as a ``Shape``, with another vocabulary if given."""
    preset = PRESETS[name]
    return Shape(
        name=name,
        n_layer=preset.n_layer,
        n_head=preset.n_head,
        n_embd=preset.n_embd,
        vocab_size=vocab_size or preset.vocab_size,
        length=length,
        positions=preset.block_size,
    )


NARROW = Shape(**asdict(shapes.NARROW), length=256)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process of a contender does in a step."""

    shape: Shape
    batch: int
    """Sequences of a rank in a step, without accumulation."""
    precision: str
    compile: bool = False
    device: str = "cpu"
    threads: int = 2
    """CPU threads of a process; on a GPU as many as the machine gives."""

    @property
    def tokens(self) -> int:
        """Tokens of a step of one rank."""
        return self.batch * self.shape.length

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for records and for a worker."""
        return asdict(self)


def work_from(values: dict[str, Any]) -> Work:
    """The work that ``as_dict`` described."""
    return Work(**{**values, "shape": Shape(**values["shape"])})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contender in a row."""

    name: str
    """Unique in the row."""
    kind: str
    """``OURS``, ``ENGINE``, ``DDP`` or one of ``PEERS``."""
    ranks: int = 1
    keeps_memory: bool = False
    """Whether a peer gets this program's memory settings (``runtime/host_memory.py``) too. Goals are set against peers
    as they are; the ratio to these is given beside it."""
    apart: bool = False
    """Whether its ranks know nothing of each other: what the machine gives to as many processes at once. No strategy
    can scale better; the row gives this limit beside its ratio."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A comparison: the first entry against the best of the others, interleaved."""

    key: str
    title: str
    work: Work
    entries: tuple[Entry, ...]
    target: float
    """The ratio that the first entry should reach."""
    per_rank: bool = False
    """Compare tokens per second and rank, not in all: weak scaling."""


def rows(device: str, *, cores: int, peers: tuple[str, ...]) -> list[Row]:
    """The rows that are measured on ``device`` with these peers."""
    return _on_gpu(peers) if device == "cuda" else _on_cpu(cores, peers)


def _on_cpu(cores: int, peers: tuple[str, ...]) -> list[Row]:
    small, found = published("small", length=256), []
    for shape, batch in ((small, 4), (NARROW, 8)):
        for precision, target in (("fp32", 1.15), ("bf16", 1.2)):
            work = Work(shape=shape, batch=batch, precision=precision, threads=cores)
            found.append(_against_peers(work, peers, target=target))
    compiled = tuple(peer for peer in peers if peer == NANOGPT)
    for shape, batch in ((small, 4), (NARROW, 8)):
        work = Work(shape=shape, batch=batch, precision="bf16", compile=True, threads=cores)
        found.append(_against_peers(work, compiled, target=1.1))
    found.append(_engine(Work(shape=NARROW, batch=8, precision="fp32", threads=cores)))
    found.append(_engine(Work(shape=small, batch=4, precision="bf16", threads=cores)))
    tiny = Work(shape=published("tiny", length=256), batch=4, precision="fp32", threads=1)
    found += [_scaling(tiny, kind, ranks=cores) for kind in (DDP, ENGINE) if cores > 1]
    return [row for row in found if len(row.entries) > 1]


def _on_gpu(peers: tuple[str, ...]) -> list[Row]:
    found = []
    for name, batch in (("small", 32), ("medium", 16), ("large", 8), ("xl", 4)):
        work = Work(
            shape=published(name, length=1024), batch=batch, precision="bf16", compile=True, device="cuda", threads=0
        )
        found.append(_against_peers(work, tuple(peer for peer in peers if peer == NANOGPT), target=1.1))
        if name == "small":
            found.append(_engine(work))
    eager = Work(shape=published("small", length=1024), batch=16, precision="bf16", device="cuda", threads=0)
    found.append(_against_peers(eager, tuple(peer for peer in peers if peer == HUGGING_FACE), target=1.5))
    return found


def _against_peers(work: Work, peers: tuple[str, ...], *, target: float) -> Row:
    compiled = ", compiled" if work.compile else ""
    title = f"{work.shape.name}, T={work.shape.length}, B={work.batch}, {work.precision}{compiled}"
    entries = [Entry(name=OURS, kind=OURS), *(Entry(name=peer, kind=peer) for peer in peers)]
    if work.device == "cpu" and not work.compile:
        entries += [Entry(name=f"{peer}, memory kept", kind=peer, keeps_memory=True) for peer in peers]
    return Row(key=_key(title), title=title, work=work, entries=tuple(entries), target=target)


def _engine(work: Work) -> Row:
    title = f"ZeRO-1 on one device against the plain loop, {work.shape.name}, {work.precision}"
    entries = (Entry(name=ENGINE, kind=ENGINE), Entry(name=OURS, kind=OURS))
    return Row(key=_key(title), title=title, work=work, entries=entries, target=0.97)


def _scaling(work: Work, kind: str, *, ranks: int) -> Row:
    title = f"weak scaling 1 to {ranks} cores, {work.shape.name}, {kind.removeprefix('dsgpt ')}"
    entries = (
        Entry(name=f"{ranks} ranks", kind=kind, ranks=ranks),
        Entry(name="1 rank", kind=kind),
        Entry(name=f"{ranks} apart", kind=kind, ranks=ranks, apart=True),
    )
    return Row(key=_key(title), title=title, work=work, entries=entries, target=0.95, per_rank=True)


def _key(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


ANSWER = "answer "
"""Before each answer; other lines are output of libraries."""


def main() -> None:
    """Build the contender, then serve."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import torch  # noqa: PLC0415

    from dsgpt.benchmarks.speed_trainers import open_trainer  # noqa: PLC0415
    from dsgpt.machine.probe import keep_freed_memory  # noqa: PLC0415

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
    from dsgpt.machine.launcher import exit_rank

    exit_rank(0)
