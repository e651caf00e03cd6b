"""How ranks meet in a store that a launcher may keep over attempts, with what dead ranks left in it."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from small_run import within

from dsgpt.common.errors import UserError
from dsgpt.machine import peers
from dsgpt.machine.peers import meet, open_store, tell_refusal
from dsgpt.machine.topology import Topology, free_port

PLACES = [Topology(rank=rank, local_rank=0, world_size=2, local_world_size=1, launcher="torchrun") for rank in range(2)]
"""Of a rank on each of two machines."""


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(peers, "JOIN_SEC", 20.0)
    monkeypatch.setattr(peers, "OBSERVED_SEC", 0.5)
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def stores(pool) -> list[dist.Store]:
    """The store of an attempt, as each rank sees it."""
    return [open_store(place) for place in PLACES]


def test_a_rank_that_died_before_the_others_came_is_not_met(pool, stores):
    stores[1].set("here/1", "of-the-dead host-1")
    first = pool.submit(meet, stores[0], PLACES[0])
    time.sleep(1)
    assert not first.done()
    second = pool.submit(meet, stores[1], PLACES[1])
    assert len(json.loads(first.result().get("hosts"))) == 2
    assert second.result().get("hosts") == first.result().get("hosts")


def test_a_refusal_is_heard_by_ranks_that_were_restarted_more_often_and_not_by_the_next_attempt(
    pool, stores, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")  # of a machine that came back
    tell_refusal(PLACES[1], ["no GPU"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    with pytest.raises(UserError, match=r"^rank 1 on .* refused: no GPU$"):
        meet(stores[0], PLACES[0])
    first, second = map(pool.submit, [meet] * 2, stores, PLACES)
    assert first.result().get("hosts") == second.result().get("hosts")
    tell_refusal(PLACES[1], ["no disk"])
    with pytest.raises(UserError, match=r"refused: no disk$"):
        meet(stores[0], PLACES[0])


def test_a_refusal_waits_for_a_rank_0_that_is_late(pool):
    told = pool.submit(tell_refusal, PLACES[1], ["no GPU"])
    time.sleep(2)
    with pytest.raises(UserError, match=r"refused: no GPU$"):
        meet(open_store(PLACES[0]), PLACES[0])
    within(told.done, seconds=10)


SERVES = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(60)
"""


def test_a_rank_leaves_if_the_store_stops_answering_before_all_are_there(monkeypatch):
    """As when rank 0's machine is cut off: the connection stays, and nothing comes."""
    port, told = free_port(), []
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(peers, "BEAT_SEC", 0.1)
    monkeypatch.setattr(peers, "OBSERVED_SEC", 0.5)
    monkeypatch.setattr(peers.os, "_exit", lambda _: None)
    waiting = peers.Peers(PLACES[1], stall_timeout=2.0)
    waiting.on_lost_rank = lambda lost: told.append(str(lost))

    def join() -> None:
        with contextlib.suppress(dist.DistError):  # when the server is killed
            waiting.join()

    joins = threading.Thread(target=join)
    with subprocess.Popen([sys.executable, "-c", SERVES, str(port)]) as server:
        try:
            joins.start()
            within(waiting._guard.is_alive, seconds=30)
            assert not told
            server.send_signal(signal.SIGSTOP)
            within(lambda: told, seconds=20)
        finally:
            server.kill()
            for thread in (joins, waiting._guard):  # they end while ``_exit`` is replaced
                thread.join(timeout=60)
    assert told[0].startswith("rank 0 or its launcher, at 127.0.0.1, does not answer any more, in start")
