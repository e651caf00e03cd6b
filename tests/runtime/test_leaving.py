"""Every process that joined a group ends at once: an ordinary exit aborts about one in a hundred."""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TRAINING, CELLS, SPEED = "src/gpt2.py", "src/dsgpt/benchmarks/worker.py", "src/dsgpt/benchmarks/speed_work.py"
ENDED_BY = {
    "src/dsgpt/training/run.py": TRAINING,
    "src/dsgpt/planner/calibrate.py": "src/dsgpt/planner/calibrate.py",
    "src/dsgpt/benchmarks/parity_rank.py": CELLS,
    "src/dsgpt/benchmarks/plan_rank.py": CELLS,
    "src/dsgpt/benchmarks/resume_rank.py": CELLS,
    "src/dsgpt/benchmarks/speed_trainers.py": SPEED,
    "tests/runtime/test_process_group.py": "tests/runtime/test_process_group.py",
    "tests/strategies/strategy_worker.py": CELLS,
    "tests/strategies/torch_on_ranks.py": "tests/strategies/torch_on_ranks.py",
    "tests/telemetry/test_interval.py": "tests/telemetry/test_interval.py",
    "tests/training/fp16_on_cpu.py": "tests/training/fp16_on_cpu.py",
}
"""For each file that joins a group, the file whose last line the process reaches."""


JOINS = re.compile(r"(?<!def )\bjoined\((?:config\.)?topology")


def test_whoever_joins_a_group_leaves_at_once():
    files = [*REPOSITORY.glob("src/**/*.py"), *REPOSITORY.glob("tests/**/*.py")]
    texts = {str(file.relative_to(REPOSITORY)): file.read_text(encoding="utf-8") for file in files}
    joining = {name: len(JOINS.findall(text)) for name, text in texts.items() if JOINS.search(text)}
    assert set(joining) == set(ENDED_BY)
    for name, ender in ENDED_BY.items():
        processes = joining[name] if name == ender else 1
        assert len(re.findall(r"\bleave\(\d", texts[ender])) >= processes or ender == TRAINING, name
    assert "leave(train(" in texts[TRAINING]


def test_it_writes_what_was_printed_and_runs_nothing_more():
    code = "from dsgpt.machine.launcher import leave; import atexit; atexit.register(print, 'more'); "
    code += "print('all'); leave(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, "all\n")
