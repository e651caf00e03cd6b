"""``make test`` runs two tests at a time; what shares launches has to stay in one process, or it is launched twice."""

import re
import subprocess
import sys
from collections import defaultdict

from small_run import REPOSITORY


def test_a_file_stays_in_one_process():
    """pytest 9.2 hides the names that pytest-xdist 3.8 writes the groups into, and nothing was said of it."""
    options = (REPOSITORY / "Makefile").read_text().split("-m pytest ", 1)[1].splitlines()[0].split()
    files = ["tests/optimization/test_schedule_golden.py", "tests/data/test_order.py", "tests/config/test_batch.py"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options, *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    processes = defaultdict(set)
    for process, file in re.findall(r"^\[(gw\d)\].* PASSED (\S+\.py)::", done.stdout, flags=re.MULTILINE):
        processes[file].add(process)
    assert sorted(processes) == sorted(files)
    assert all(len(found) == 1 for found in processes.values()), processes
    assert len(set.union(*processes.values())) == 2
