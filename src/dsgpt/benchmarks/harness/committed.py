"""The committed records: which command makes each of them, and which shows it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsgpt.benchmarks.harness.sources import DEMO, SUITES, SWEEP

TRAINED = Path("checkpoint/demo-zero1")
"""The run whose model some suites measure; the demo makes it."""
TEXT = Path("data/python-stdlib/val.bin")
"""What that run was validated on."""
REFERENCE = Path("checkpoint/reference/cpu-2-cores")
"""Folder of the committed records, relative to the repository."""
WORK = Path("checkpoint/records/work")
"""Folder that the commands write to."""
READY = Path("checkpoint/records/ready")
"""Holds remade records and their ``SOURCES.json`` until all are remade. It has the layout of ``REFERENCE``."""
RUNS = ("demo-baseline", "demo-zero1")
CHARTS = "overview,memory,scaling_scaling,scaling_efficiency,strategies_throughput,plan_memory,latency_by_concurrency"
"""The charts of the pages, as in the Makefile."""
SWEEPS = "sweep-*.json"
"""Committed sweeps, below ``REFERENCE``."""
PLAN, INFERENCE = "plan.json", "inference.json"
ENGINES = ("one", "static", "continuous", "vllm")
"""Of the record of many requests; ``make vllm`` installs the last."""
WITH_PEERS = ("speed", "decoding")
"""Suites that other implementations take part in."""
RUN_FILES = ("training_metrics.json", "metrics.jsonl")


@dataclass(frozen=True, kw_only=True)
class CommittedRecord:
    """One or more records that one command makes."""

    name: str
    suite: str
    """What it is called in ``dsgpt.benchmarks.harness.sources``."""
    records: tuple[str, ...]
    """Those of ``files`` that have an entry in ``SOURCES.json``."""
    files: Mapping[str, str]
    """Maps paths below ``WORK`` to the paths of the same files below ``READY`` and ``REFERENCE``."""
    make: tuple[str, ...]
    """The command that makes them below ``WORK``, without the interpreter."""
    show: tuple[str, ...]
    """The command that makes pages or pictures from them."""


def _suite(name: str, *flags: str, page: str = "") -> CommittedRecord:
    record, script = f"{name}.json", "src/benchmark.py"
    return CommittedRecord(
        name=name,
        suite=name,
        records=(record,),
        files={record: record},
        make=(script, name, *flags, "--output", f"{WORK}/{record}"),
        show=(script, name, "--table-from", f"{REFERENCE}/{record}", "--page", f"docs/{page or name}.md"),
    )


def _sweep(suite: str, devices: str, steps: int) -> CommittedRecord:
    name, command = f"sweep-{suite}", ("src/benchmark.py", "run")
    made, record = f"{name}/sweep.json", f"{name}.json"
    flags = ("--suite", suite, "--devices", devices, "--repeats", "3", "--steps", str(steps), "--profile_comm", "3")
    return CommittedRecord(
        name=name,
        suite=SWEEP,
        records=(record,),
        files={made: record},
        make=(*command, *flags, "--output", f"{WORK}/{made}"),
        show=(*command, "--table-from", f"{REFERENCE}/{record}", "--page", f"docs/{name}.md"),
    )


def _demo() -> CommittedRecord:
    runs = [word for run in RUNS for word in ("--run", f"{run.removeprefix('demo-')}={REFERENCE}/{run}")]
    return CommittedRecord(
        name=DEMO,
        suite=DEMO,
        records=tuple(f"{run}/{RUN_FILES[0]}" for run in RUNS),
        files={f"demo/checkpoint/{run}/{file}": f"{run}/{file}" for run in RUNS for file in RUN_FILES},
        make=("src/demo.py", "--into", f"{WORK}/demo"),
        show=(
            *("charts/generate_charts.py", "--output-dir", "docs/images"),
            *("--only", CHARTS, "--format", "svg", "--theme", "both", *runs),
        ),
    )


_OTHERWISE = {
    "plan": _suite("plan", page="planner"),
    "speed": _suite("speed", "--rounds", "3"),
    "recipes": _suite("recipes", page="recipe-search"),
    "decoding": _suite("decoding", "--checkpoint", TRAINED.as_posix(), "--data", TEXT.as_posix()),
    "inference": _suite(
        "inference", "--checkpoint", TRAINED.as_posix(), "--engines", ",".join(ENGINES), page="concurrency"
    ),
    "serving": _suite("serving", "--checkpoint", TRAINED.as_posix(), page="serving-load"),
}
"""Suites whose page has another name, or whose record is made with flags."""
_SWEEPS = (_sweep("strategies", "2", 24), _sweep("scaling", "1,2", 16))
_MADE = (_demo(), *(_OTHERWISE.get(name) or _suite(name) for name in SUITES), *_SWEEPS)
RECORDS = {record.name: record for record in _MADE}
"""By name, in the order in which they are remade."""
