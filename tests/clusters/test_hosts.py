"""Training across hosts with networks of their own: the losses are those of one host."""

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from forked_ranks import run_script
from small_run import REPOSITORY, command_line, write_data, write_recipe
from training_runs import SCRIPT, finished, read_lines

from dsgpt.benchmarks.hosts import enter

HOSTS, STEPS = 4, 4
RANK = """
import runpy
import sys
from dsgpt.benchmarks.hosts import Hosts, be_rank_on
name, per_host, *words = sys.argv[1:]
be_rank_on(Hosts(name, 0), per_host=int(per_host))
sys.argv = words
runpy.run_path(words[0], run_name="__main__")
"""
"""A forked rank that moves to its host before it becomes ``src/gpt2.py``."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, and the baseline on one host in ``baseline``."""
    folder = write_data(tmp_path_factory.mktemp("hosts"))
    (folder / "rank.py").write_text(RANK)
    for name in ("zero1", "zero3", "pipeline", "3d"):
        shipped = json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())
        own = {key: shipped[key] for key in ("zero_optimization", "pipeline", "tensor_parallel") if key in shipped}
        write_recipe(folder / f"{name}.json", **own)
    finished(run_script(SCRIPT, words(folder, "baseline", "zero1"), cwd=folder))
    return folder


def words(folder: Path, name: str, recipe: str, run_type: str = "baseline", **more: object) -> list[str]:
    """Flags of a run of a few steps in the folder ``name``."""
    once = {"max_train_steps": STEPS, "max_val_steps": 1, "no_inference": True, "save_every": 0}
    files = {"deepspeed_config": folder / f"{recipe}.json", "checkpoint_path": folder / name}
    return command_line(folder, run_type=run_type, **once, **files, **more)


def assert_losses_of_one_host(folder: Path, name: str) -> None:
    one, several = (
        {line["step"]: line["loss"] for line in read_lines(folder / run) if "loss" in line}
        for run in ("baseline", name)
    )
    assert len(one) == STEPS
    assert several == pytest.approx(one, abs=2e-4)


@pytest.mark.parametrize(
    ("recipe", "run_type", "ranks", "per_host"),
    [
        ("zero1", "optimized", 2, 1),
        ("zero3", "optimized", 2, 1),
        ("zero1", "fsdp", 2, 1),
        ("pipeline", "optimized", 4, 1),
        ("3d", "optimized", 8, 2),
    ],
)
def test_strategies_compute_on_several_hosts_what_one_computes(hosts, trained, recipe, run_type, ranks, per_host):
    """Ranks of neighbouring numbers share a host; the pipeline's stages and data ranks are on four."""
    run = f"{recipe}-{run_type}"
    flags = [hosts.name, per_host, SCRIPT, *words(trained, run, recipe, run_type)]
    finished(run_script(trained / "rank.py", flags, ranks=ranks, cwd=trained, environment=hosts.variables()))
    assert_losses_of_one_host(trained, run)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "no-ssh", "ssh"])
def test_launchers_start_ranks_on_two_hosts(hosts, trained, tmp_path, launcher):
    script = "torchrun.sh" if launcher == "torchrun" else "run_hostfile.sh"
    hostfile, log = tmp_path / "hosts", tmp_path / "log"
    hostfile.write_text("".join(f"{hosts.address(number)} slots=1\n" for number in range(2)))
    shared = {"MASTER": hosts.address(0), "NODES": "2", "DEVICES": "1", "HOSTFILE": str(hostfile)}
    run_type = "ddp" if launcher == "torchrun" else "optimized"
    command = [REPOSITORY / "launch" / script, *words(trained, launcher, "zero1", run_type)]

    def ends(numbers: range, **variables: str) -> None:
        started = [
            hosts.start(
                number, *command, log=log,
                variables=shared | variables | ({"NODE_RANK": str(number)} if launcher == "no-ssh" else {}),
            )
            for number in numbers
        ]  # fmt: skip
        assert [process.wait(timeout=240) for process in started] == [0] * len(numbers), log.read_text()

    if launcher == "ssh":
        with hosts.reached_by_ssh(tmp_path / "ssh") as variables:
            ends(range(1), **variables)
    else:
        ends(range(2))
    assert_losses_of_one_host(trained, launcher)


@pytest.mark.long
def test_a_link_is_as_slow_and_as_lossy_as_asked(hosts):
    def socket_on(number: int) -> socket.socket:
        enter(hosts.host(number))  # moves this thread alone; the socket stays there
        made = socket.socket(type=socket.SOCK_DGRAM)
        made.bind((hosts.address(number), 5000))
        made.settimeout(1)
        return made

    def arrive(sender: int, *, count: int, size: int) -> list[float]:
        """When the first packet is sent, and when each that is not lost arrives at the other end."""
        times = [time.monotonic()]
        for _ in range(count):
            ends[sender].sendto(bytes(size), (hosts.address(1 - sender), 5000))
        with contextlib.suppress(TimeoutError):
            while True:
                ends[1 - sender].recv(size)
                times.append(time.monotonic())
        return times

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        ends = [thread.submit(socket_on, number).result() for number, thread in enumerate((first, second))]
    assert hosts.shape(1, mbit=4) == {"mbit": "tc tbf"}
    for sender in range(2):
        times = arrive(sender, count=400, size=1000)
        assert 100 < len(times) < 16 + 1.1 * 500 * (times[-1] - times[0])  # 16 kB at once, then 500 kB a second
    assert hosts.shape(1, loss=0.5) == {"loss": "iptables statistic"}
    assert 60 < len(arrive(0, count=200, size=10)) < 140
    assert hosts.shape(1, delay_ms=50) == {"delay_ms": "TUN relay"}
    begins, arrives = arrive(1, count=1, size=10)
    assert arrives - begins > 0.05
    assert len(arrive(1, count=50, size=1000)) == 51  # they come at once: more would overflow the socket
    assert hosts.shape(1) == {}
    assert len(arrive(0, count=200, size=10)) == 201
