"""Freed memory stays with the process: large tensors that come again cause few page faults."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from dsgpt.machine.probe import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else None

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        tensors = [torch.ones(size) for size in (12_500_000, 5_000_000, 20_000_000)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(kept, faults())
"""


def run(mode: str, **variables: str) -> list[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], env=kept | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the settings are those of glibc")
def test_tensors_that_come_again_cause_few_page_faults():
    (_, without), (kept, with_it) = run("leave"), run("keep")
    assert kept == "True"
    assert int(with_it) < int(without) / 4


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(variable):
    assert run("keep", **{variable: "1" if variable.startswith("MALLOC") else "glibc.malloc.arena_max=1"})[0] == "False"
