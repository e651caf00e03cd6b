"""Whose CPU time counts as that of others. Other programs may use this machine meanwhile."""

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from dsgpt.machine import probe as load
from dsgpt.machine.probe import LoadOfOthers

BURN = "import time\nwhile time.process_time() < 1: pass"
BEHIND_A_SHELL = ["sh", "-c", '"$@"; true', "sh"]
"""Its child ends before it does."""
ORPHANED = ["sh", "-c", '"$@" & echo $!', "sh"]
"""Its child belongs to nobody of ours, as a program of another user would."""


@pytest.mark.parametrize("shell", [[], BEHIND_A_SHELL], ids=["child", "grandchild"])
def test_own_children_are_not_others_while_they_live_and_afterwards(shell):
    found = LoadOfOthers()
    before = found.own_seconds()
    command = [*shell, sys.executable, "-c", f"{BURN}\nprint(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert found.own_seconds() - before >= 0.95
        child.communicate(b"\n")
    assert found.own_seconds() - before >= 0.95


def test_another_program_is(monkeypatch):
    monkeypatch.setattr(load, "SHORTEST_SEC", 0.0)
    found = LoadOfOthers()
    own, busy, started = found.own_seconds(), found.busy_seconds(), time.monotonic()
    done = subprocess.run([*ORPHANED, sys.executable, "-c", BURN], check=True, stdout=subprocess.PIPE)
    while psutil.pid_exists(int(done.stdout)):
        time.sleep(0.05)
    share, seconds = found.figures()["cpu_share_of_others"], time.monotonic() - started
    assert found.own_seconds() - own < 0.5 and found.busy_seconds() - busy >= 0.9
    assert share * seconds * len(psutil.Process().cpu_affinity()) >= 0.5


def refuses(*_: object, **__: object) -> None:
    raise psutil.AccessDenied


@pytest.mark.parametrize(
    ("owner", "name"),
    [(psutil.Process, "children"), (psutil.Process, "cpu_affinity"), (Path, "read_text"), (os, "getloadavg")],
)
def test_what_the_system_hides_is_unknown(monkeypatch, owner, name):
    """Linux with hidepid, macOS, a masked /proc: nothing ends a training."""
    monkeypatch.setattr(load, "SHORTEST_SEC", 0.0)
    before = LoadOfOthers()
    if name == "cpu_affinity":
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, refuses if owner is psutil.Process else Mock(side_effect=OSError))
    assert LoadOfOthers().figures()["cpu_share_of_others"] is None
    before.figures()


def test_a_short_measurement_judges_nothing():
    assert LoadOfOthers().figures()["cpu_share_of_others"] is None
