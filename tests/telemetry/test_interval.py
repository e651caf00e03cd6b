"""Figures of an interval: which ranks the others waited for."""

import json
import math
import os
import subprocess
import sys
import threading
import time

import pytest
from forked_ranks import run_script

from dsgpt.telemetry.meter import Figures, RankShare, RankTimes, ThreadClock, interval_figures

COUNTED = Figures(steps=5, counted_tokens=400, step_secs=[1.0, 2.0, 3.0, 4.0], dataload_secs=[0.0] * 4)


def test_an_interval_names_the_ranks_that_the_others_wait_for():
    ranks = [RankShare(0.0, 6.0, 2.5), RankShare(2.5, 4.0, 2.0), RankShare(1.0, 9.0, 3.5), RankShare(0.0, 5.0, 1.0)]
    figures, _ = interval_figures(COUNTED, ranks=ranks)
    assert figures == {
        "steps": 5,
        "tokens_per_sec": 40,
        "step_time_p50_sec": 2,
        "step_time_p95_sec": 4,
        "data_wait_share": 0.25,
        "data_wait_rank": 1,
        "slowest_rank": 2,
        "slowest_rank_lag_sec": 1.0,
        "largest_loss": 3.5,
    }


def test_what_is_unknown_is_none():
    unknown, _ = interval_figures(Figures(steps=1), ranks=[RankShare(0.0, 0.0, math.nan)] * 2)
    assert [key for key, value in unknown.items() if value is not None] == ["steps"]
    for ranks in ([RankShare(0.0, math.nan, 1.0)] * 2, [RankShare(0.0, 5.0, 1.0)]):  # on GPUs; one rank
        figures, _ = interval_figures(COUNTED, ranks=ranks)
        assert (figures["slowest_rank"], figures["slowest_rank_lag_sec"]) == (None, None)


def test_the_times_of_intervals_are_added():
    run = RankTimes()
    assert set(run.figures().values()) == {None}
    for computing in ([6.0, 4.0], [1.0, 4.0]):
        _, times = interval_figures(COUNTED, ranks=[RankShare(1.0, seconds, 1.0) for seconds in computing])
        run.add(times)
    assert run.figures() == {
        "data_wait_share": 0.1,
        "data_wait_rank": 0,
        "slowest_rank": 1,
        "slowest_rank_lag_sec": pytest.approx(1 / 8),
    }


def test_a_thread_that_sleeps_does_not_compute():
    """It may wait for a core when it wakes, which counts as computing."""
    clock, began = ThreadClock(), time.perf_counter()
    started = clock.seconds()
    time.sleep(0.2)
    assert time.perf_counter() - began - (clock.seconds() - started) > 0.1


SPIN = "while True: pass"


def test_a_thread_whose_core_is_shared_computes_all_the_time():
    """Without the kernel's second counter, 0.3 s would be missing; what is read between two clocks may take a while."""
    found: list[float] = []

    def compute() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread, and of the process that it starts
        with subprocess.Popen([sys.executable, "-c", SPIN]) as other:
            clock, ran, began = ThreadClock(), time.thread_time(), time.perf_counter()
            computed = clock.seconds()
            while (passed := time.perf_counter() - began) - (time.thread_time() - ran) < 0.3 and passed < 30:
                pass
            found.extend([clock.seconds() - computed, passed])
            other.kill()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    computed, passed = found
    assert computed == pytest.approx(passed, abs=0.2)


RANKS = """
import json, time
import torch
import torch.distributed as dist
from dsgpt.machine.launcher import leave
from dsgpt.machine.process_group import HostGroup, joined
from dsgpt.machine.topology import read_topology
from dsgpt.strategies.base import StepResult
from dsgpt.telemetry.meter import RankShare, interval_figures
from dsgpt.telemetry.meter import StepMeter

topology = read_topology()
with joined(topology, torch.device("cpu")):
    ranks, meter = HostGroup(), StepMeter(torch.device("cpu"), tokens_per_step=1)
    own = torch.tensor(1.0 + topology.rank)
    for step in range(1, 9):
        started, begun = meter.start(), time.thread_time()
        while time.thread_time() - begun < (0.06 if topology.rank else 0.02):
            pass
        dist.all_reduce(torch.ones(1))
        one = torch.tensor(1.0)
        result = StepResult(loss=one, own_loss=own, grad_norm=one, lr=1.0, skipped=torch.tensor(False))
        meter.stop(started, step=step, epoch=0, result=result, dataload_sec=0.0)
    meter.flush()
    figures, computing = meter.take_interval()
    shares = ranks.gathered(RankShare(0.0, computing, meter.last_own_loss))
    if topology.rank == 0:
        print(json.dumps([sum(figures.step_secs), interval_figures(figures, ranks=[RankShare(*s) for s in shares])[0]]))
leave(0)
"""


def test_the_rank_that_computes_longest_is_found_although_all_steps_take_equally_long(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    done = run_script(script, [], ranks=2)
    seconds, figures = json.loads(done.stdout)
    assert seconds >= 5 * 0.06
    assert figures["slowest_rank"] == 1
    assert figures["slowest_rank_lag_sec"] >= 0.02
    assert figures["largest_loss"] == 2.0
