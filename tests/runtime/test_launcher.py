"""Launcher commands are recognised, and a rank notices the end of every process of its launcher."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dsgpt.machine.launcher import launcher_command, starts_launcher

RANK = """
from dsgpt.machine.launcher import Launcher
launcher = Launcher()
print(launcher.is_gone(), flush=True)
input()
print(launcher.is_gone(), flush=True)
"""
START = "import os, subprocess; print({name!r}, os.getpid(), flush=True); subprocess.call({command!r})"
"""A process that starts ``command`` on the same input and output, and waits for it."""


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_launcher_command_is_recognised(launcher):
    words = launcher_command(launcher, 2, "--no_such_flag")
    assert starts_launcher([*words, "src/gpt2.py"])
    assert Path(words[0]).exists() and words[1:3] in (["--num_gpus", "2"], ["--nproc_per_node", "2"])
    assert words[-1] == "--no_such_flag"


def test_one_process_needs_no_launcher():
    assert launcher_command("python", 1) == [sys.executable]
    assert not starts_launcher([sys.executable, "src/gpt2.py"])


@pytest.mark.parametrize(("killed", "noticed"), [("shell", "False"), ("torchrun", "True"), ("agent", "True")])
def test_the_end_of_each_process_up_to_the_launcher_is_noticed(tmp_path: Path, killed: str, noticed: str):
    """A shell starts torchrun, which starts an agent, which starts the rank. A shell may end before its run."""
    script = tmp_path / "torchrun"
    agent = START.format(name="agent", command=[sys.executable, "-c", RANK])
    script.write_text(START.format(name="torchrun", command=[sys.executable, "-c", agent]))
    shell = START.format(name="shell", command=[sys.executable, str(script)])
    with subprocess.Popen(
        [sys.executable, "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        words = [process.stdout.readline().split() for _ in range(3)]
        pids = {name: int(pid) for name, pid in words}
        assert process.stdout.readline() == "False\n"
        dying = psutil.Process(pids[killed])
        dying.kill()
        dying.wait(timeout=60)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{noticed}\n"
