"""A rank that dies, hangs, fails or is cut off is named with its host and step, and the others leave."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from small_run import command_line, within, write_data, write_recipe
from training_runs import read_lines

from dsgpt.benchmarks.hosts import Hosts
from dsgpt.common.errors import EXIT_LOST_RANK, EXIT_NON_FINITE, EXIT_USER_ERROR
from dsgpt.machine import peers
from dsgpt.machine.console import Progress
from dsgpt.machine.peers import SLOW_STEPS, Peers, RankStatus, culprits, slow_ranks
from dsgpt.machine.topology import Topology, free_port
from dsgpt.record.schema import STEPS_FILE

HOSTS = 2
RECV = "/torch/distributed/distributed_c10d.py:2800 in recv"


def status(progress_count: int = 5, **more: Any) -> RankStatus:
    facts = {"host": "h", "phase": "step", "step": 3, "progress_count": progress_count, "stack": (RECV,)} | more
    return RankStatus(**facts)


IN_PIPELINE = [status(collectives={"0": 8}), status(collectives={"0": 9}, stack=("data.py:1 in read",))]


@pytest.mark.parametrize(
    ("named", "ranks"),
    [
        ([1], [status(), status(progress_count=4), status()]),
        ([2], [status(), status(progress_count=4), status(silent=True)]),
        ([0], [status(failed="ValueError: x"), status(silent=True)]),
        ([1], [status(collectives={"0": 8}), status(collectives={"0": 7})]),
        # Rank 1 waits for 2 in group 1, and 0 waits for 1 in group 0.
        ([2], [status(collectives=each) for each in ({"0": 8}, {"0": 7, "1": 3}, {"0": 7, "1": 2})]),
        ([1], IN_PIPELINE),
        ([1], [status(), status(stack=("/torch/distributed/distributed_c10d.py:1 in barrier",)), status()]),
        ([0, 1], [status(), status()]),
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(named, ranks):
    assert culprits(dict(enumerate(ranks)), pipeline=ranks is IN_PIPELINE)[0] == named


def test_slow_is_a_rank_whose_work_takes_half_as_long_again_as_that_of_its_peers():
    work = [0.2, 0.2, 0.31, 0.2]
    assert slow_ranks({rank: status(own_sec=sec) for rank, sec in enumerate(work)}) == {2: 0.2}
    assert not slow_ranks({rank: status(own_sec=sec) for rank, sec in enumerate([0.2, 0.29])})
    assert not slow_ranks({rank: status(own_sec=sec) for rank, sec in enumerate([0.2, 0.2, 0.5, 0.5])}, stages=2)
    assert not slow_ranks({0: status(own_sec=0.2), 1: status()})


# Ranks of one process with a real store; they train nothing.

STALL_SEC = 2.0


def place(rank: int, **more: Any) -> Topology:
    facts = {"local_rank": 0, "world_size": 2, "local_world_size": 1, "launcher": "torchrun"} | more
    return Topology(rank=rank, **facts)


@pytest.fixture
def store(monkeypatch) -> Iterator[Any]:
    """Rank 0 serves it; all times are short."""
    times = {"BEAT_SEC": 0.1, "OBSERVED_SEC": 0.4, "BUSY_SEC": 0.2, "JOIN_SEC": 1.0, "LIMITS_SEC": {"record": 60.0}}
    for name, value in times.items():
        monkeypatch.setattr(peers, name, value)
    monkeypatch.setattr(peers.os, "_exit", lambda _: None)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return peers.open_store(place(0))


@pytest.fixture
def both(store) -> Iterator[tuple[list[Peers], list[str]]]:
    """Both ranks after they have met, and what they are told when one of them stands still."""
    ranks, told = [Peers(place(rank), stall_timeout=STALL_SEC) for rank in range(2)], []
    with ranks[1], ranks[0], ThreadPoolExecutor() as pool:
        for rank in ranks:
            rank.on_lost_rank = lambda lost: told.append(str(lost))
        list(pool.map(Peers.join, ranks))
        yield ranks, told


@pytest.mark.long
def test_the_limit_is_that_of_the_rank_that_is_waited_for(both):
    """Rank 0 hashes a file at the start, then writes the record, each for longer than a step may take, and hangs."""
    ranks, told = both
    Progress.heard, bar = ranks[0].note_own_progress, Progress(total=99, what="hashing", unit="B", shown=False)
    end = time.monotonic() + 1.5 * STALL_SEC
    while time.monotonic() < end:
        bar.advance()
        time.sleep(0.1)
    for rank in ranks:
        rank.begin("record", 3)
    ranks[1].begin("agreement")
    time.sleep(1.5 * STALL_SEC)
    assert not told
    ranks[0].begin("agreement")
    for rank in ranks:
        rank.begin("step", 4)
    ranks[1].begin("agreement")
    within(lambda: told)
    assert told[0].startswith(f"rank 0 on {socket.gethostname()} hangs, and the others wait for it, in step 4")


@pytest.mark.parametrize("own", ["DataLoader timed out after 5 seconds", "[gloo/tcp] Timed out: no other is at fault"])
def test_an_error_of_its_own_is_told_although_it_looks_like_that_of_another(both, own):
    ranks, _ = both
    with pytest.raises(RuntimeError, match="imed out"), ranks[1].explained():
        raise RuntimeError(own)
    assert ranks[0]._all_statuses()[1].failed == f"RuntimeError: {own}"


def test_who_copies_data_before_the_meeting_is_waited_for(store):
    heard, end = peers.say_busy(place(1)), time.monotonic() + 2.5
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(peers.meet, store, place(0))
        while time.monotonic() < end:
            heard()
            time.sleep(0.05)
        assert not waits.done()
        peers.meet(peers.open_store(place(1)), place(1))
        waits.result()


FAULTY = """
import os, signal, sys, time
from dsgpt.data import remote
from dsgpt.machine import peers
from dsgpt.machine.launcher import exit_rank
from dsgpt.strategies import pytorch
from dsgpt.training import trainer
kind = sys.argv.pop(1)
peers.OBSERVED_SEC, peers.JOIN_SEC = 3.0, 60.0
begin = peers.Peers.__init__


def patient(self, topology, *, stall_timeout):
    begin(self, topology, stall_timeout=8.0)


peers.Peers.__init__ = patient
train_step = pytorch.TorchStrategy.train_step


def stand_still_here():
    time.sleep(1000)


class Endless:
    # Stands for a result that a GPU never computes.
    def __float__(self):
        stand_still_here()


def poison(module, args, out):
    out.register_hook(lambda gradient: gradient * float("nan"))


def faulty(self, batches, step):
    if os.environ["RANK"] == "1" and step == 4:
        if kind == "hangs":
            stand_still_here()
        if kind in ("dies", "stops"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "dies" else signal.SIGSTOP)
        if kind == "fails":
            raise ValueError("a bug of this rank")
        if kind == "gradient":
            self.model.ln_f.register_forward_hook(poison)
    if os.environ["RANK"] == "1" and kind == "slow":
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass
    result = train_step(self, batches, step)
    if kind == "device" and step == 4 and os.environ["RANK"] == "1":
        result = result._replace(loss=Endless())
    return result


def slow_write(self, name, source):
    time.sleep(1.5 if kind == "copies" else 0)
    write(self, name, source)


write, remote.Place.write = remote.Place.write, slow_write
pytorch.TorchStrategy.train_step = faulty
from dsgpt.training.command import train
if kind == "refuses" and os.environ["RANK"] == "1":
    sys.argv += ["--threads_per_device", "0"]
exit_rank(train(sys.argv[1:]))
"""


class Pair:
    """A rank on each of two hosts, without a launcher that would end one for the other."""

    def __init__(self, hosts: Hosts, folder: Path, kind: str, *, python: str, **flags: object) -> None:
        self.hosts, self.run = hosts, folder / "run"
        write_recipe(write_data(folder) / "recipe.json")
        script = folder / "faulty.py"
        script.write_text(FAULTY)
        self.logs = [folder / f"{rank}.log" for rank in range(2)]
        once = {"max_val_steps": 1, "no_inference": True, "max_train_steps": 4000, "save_every": 0} | flags
        words = command_line(folder, run_type="ddp", checkpoint_path=self.run, steps_per_print=1, **once)
        place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500"}
        self.ranks = [
            hosts.start(rank, python, script, kind, *words, log=log, variables=place | {"RANK": str(rank)})
            for rank, log in enumerate(self.logs)
        ]

    def steps(self) -> int:
        lines = read_lines(self.run) if (self.run / STEPS_FILE).exists() else []
        return max((line["step"] for line in lines), default=0)

    def ends(self, *ranks: int, seconds: float = 120) -> list[int]:
        return [self.ranks[rank].wait(timeout=seconds) for rank in ranks]

    def printed(self, rank: int = 0) -> str:
        return self.logs[rank].read_text()

    def kill(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


@pytest.fixture
def start(hosts, tmp_path):
    started: list[Pair] = []

    def begin(kind: str, **flags: object) -> Pair:
        started.append(Pair(hosts, tmp_path, kind, python=sys.executable, **flags))
        return started[-1]

    yield begin
    for pair in started:
        pair.kill()


LONG = pytest.mark.long
OTHERS = ("dies", "stops", "fails", "device")


@pytest.mark.parametrize("kind", ["hangs", *(pytest.param(kind, marks=LONG) for kind in OTHERS)])
def test_a_rank_at_fault_is_named(start, kind):
    pair = start(kind)
    assert pair.ends(0) == [EXIT_LOST_RANK]
    hangs = "hangs, and the others wait for it"
    what = {"hangs": hangs, "device": hangs, "fails": "failed"}.get(kind, "gives no sign of life")
    assert re.search(rf"^error: rank 1 on {pair.hosts.host(1)} {what}.* in step 4", pair.printed(), re.MULTILINE)
    if what == hangs:
        assert "rank 1 on " in (pair.run / "train-1.log").read_text().split("hangs, and the others wait for it")[0]
        assert re.search(r"^  .*faulty.py:\d+ in stand_still_here$", pair.printed(), re.MULTILINE)
        assert pair.ends(1) == [EXIT_LOST_RANK]
    if kind == "fails":
        assert "ValueError: a bug of this rank" in pair.printed()


ENDS = {
    "gradient": (EXIT_NON_FINITE, "was the first to compute a gradient that is not finite, in step 4"),
    "slow": (0, "is slow: it computes and reads data for 0.1"),
    "refuses": (EXIT_USER_ERROR, "refused: --threads_per_device"),
}
"""How both ranks end, and what is said of rank 1. A refusal comes before others wait; the campaign traces losses."""


@pytest.mark.parametrize("kind", ["refuses", *(pytest.param(kind, marks=LONG) for kind in ("gradient", "slow"))])
def test_a_rank_is_named_and_both_end(start, kind):
    pair, (code, told) = start(kind, **({"max_train_steps": 6 * SLOW_STEPS} if kind == "slow" else {})), ENDS[kind]
    assert pair.ends(0, 1) == [code] * 2
    assert f"rank 1 on {pair.hosts.host(1)} {told}" in pair.printed()


@LONG
def test_rank_0_is_not_disturbed_while_it_copies_what_is_done(start, tmp_path):
    """The copy takes longer than a rank may give no sign of life, and rank 1 has left."""
    assert start("copies", max_train_steps=3, save_to=tmp_path / "second").ends(0, 1) == [0, 0]
    assert (tmp_path / "second" / "step-00000003" / "manifest.json").exists()
