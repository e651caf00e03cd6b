"""Runs whose machines come and go: the same training on as many devices as split its global batch."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from forked_ranks import OF_A_RANK, run_script
from small_run import REPOSITORY, command_line, within, write_data, write_recipe
from training_runs import SCRIPT, finished, read_lines, read_record, resolved

from dsgpt.common.errors import EXIT_LOST_RANK, EXIT_STOPPED, UserError
from dsgpt.machine.topology import Topology, free_port

HOSTS = 2
PLAN = {
    **{"strategy": "ddp", "model": {"parameters": 10_960}, "machine": {"devices": 2}, "seq_length": 16},
    **{"micro_batch_size": 4, "gradient_accumulation_steps": 1, "data_parallel_size": 2},
    **{"training": {"steps": 40, "seconds": 3600.0}, "step": {"seconds": 1.0}, "costs": [{"usd_per_hour": 2.0}]},
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_data(tmp_path_factory.mktemp("elastic"))
    write_recipe(folder / "recipe.json", train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=1)
    write_recipe(folder / "pipeline.json", pipeline={"stages": 2})
    write_recipe(folder / "zero3.json", zero_optimization={"stage": 3})
    (folder / "plan.json").write_text(json.dumps(PLAN))
    return folder


def words(here: Path, run: Path, recipe: str = "recipe", **flags: object) -> list[str]:
    once = {"run_type": "ddp" if recipe == "recipe" else "optimized", "deepspeed_config": here / f"{recipe}.json"}
    once |= {"max_train_steps": 60, "save_every": 5, "no_inference": True, "max_val_steps": 1, "checkpoint_path": run}
    return command_line(here, **(once | flags))


def assert_same_as_undisturbed(run: Path, flags: list[str], *, ranks: int) -> None:
    """Every step once, with the same samples and learning rate; sums over ranks may differ in their order."""
    finished(run_script(SCRIPT, [*flags, "--checkpoint_path", run.parent / "undisturbed"], ranks=ranks))
    one, other = read_lines(run.parent / "undisturbed"), read_lines(run)
    for key in ("step", "lr", "tokens"):
        assert [line[key] for line in other] == [line[key] for line in one]
    assert [line["loss"] for line in other] == pytest.approx([line["loss"] for line in one], abs=2e-4)


@pytest.mark.parametrize(
    ("machines", "started", "each", "recipe", "trains", "said"),
    [
        ((1, 8), 8, 1, "recipe", 8, "runs on 8, 4, 2 or 1 of its devices; now 8 train and 0 spares wait"),
        ((1, 8), 7, 1, "recipe", 4, "runs on 8, 4, 2 or 1 of its devices; now 4 train and 3 spares wait"),
        ((2, 4), 9, 3, "recipe", 8, "runs on 8 or 4 of its devices; now 8 train and 1 spare wait"),
        ((1, 3), 6, 2, "pipeline", 4, "runs on 4 or 2 of its devices; now 4 train and 2 spares wait"),
        ((2, 3), 16, 8, "recipe", None, "global batch 8 uses 8 of 16 ranks, which are on fewer than 2 machines"),
    ],
)
def test_as_many_ranks_train_as_split_the_global_batch(here, machines, started, each, recipe, trains, said):
    """The global batch is 8; a pipeline of two stages needs two ranks for each part of it."""
    place = Topology(rank=started - 1, local_rank=0, world_size=started, local_world_size=each, launcher="torchrun")
    with pytest.raises(UserError, match=f"^{said}") if trains is None else contextlib.nullcontext():
        config = resolved(words(here, here / "run", recipe), replace(place, machines=machines))
        assert (config.topology.world_size, config.topology.spares) == (trains, started - trains)
        assert config.topology.is_spare == (trains < started)
        assert config.topology.local_world_size == min(each, trains)
        assert config.batch.global_batch_size == 8
        assert said in "\n".join(config.notices)


SPARE = """
import os, signal, sys
from pathlib import Path
from dsgpt.machine import peers
from dsgpt.strategies import pytorch
from dsgpt.training.command import train
_, happens, where, *words = sys.argv
leave, rank, peers.OBSERVED_SEC = os._exit, os.environ["RANK"], 1.0


def note(code):
    Path(f"code-of-{rank}").write_text(str(code))
    leave(0)  # else the other ranks are terminated


def step(self, batches, step, train_step=pytorch.TorchStrategy.train_step):
    if (step, rank) == (3, where):
        exec(happens)
    return train_step(self, batches, step)


os._exit, pytorch.TorchStrategy.train_step = note, step
note(train(words))
"""


@pytest.mark.parametrize(
    ("happens", "where", "code"),
    [
        ("pass", 0, 0),
        ("os.kill(os.getpid(), signal.SIGTERM)", 0, EXIT_STOPPED),
        pytest.param("raise ValueError", 1, EXIT_LOST_RANK, marks=pytest.mark.long),
        pytest.param("leave(0)", 0, EXIT_LOST_RANK, marks=pytest.mark.long),
    ],
)
def test_a_spare_ends_as_the_run_ends(here, tmp_path, happens, where, code):
    """Three ranks, of which two train."""
    (tmp_path / "spare.py").write_text(SPARE)
    variables = {key: value for key, value in os.environ.items() if key not in OF_A_RANK} | {"PET_NNODES": "1:1"}
    flags = [happens, where, *words(here, tmp_path / "run", max_train_steps=6)]
    done = run_script(tmp_path / "spare.py", flags, ranks=3, cwd=tmp_path, environment=variables)
    finished(done)
    assert (tmp_path / "code-of-2").read_text() == str(code), done.stderr
    assert "elastic: runs on 2 of its devices; now 2 train and 1 spare wait" in done.stdout


# Machines with an agent of torchrun: forked here, or launch/torchrun.sh on hosts with networks of their own.

SLOWLY = """
import os, sys, time
from pathlib import Path
from dsgpt.machine import peers
from dsgpt.machine.launcher import exit_rank
from dsgpt.training.command import train


def begin(self, phase, step=None, begin=peers.Peers.begin):
    time.sleep(0.3 if phase == "step" and step > 10 and not Path("returned").exists() else 0)
    begin(self, phase, step)


peers.Peers.begin = begin
if __name__ == "__main__" and "RANK" in os.environ:
    exit_rank(train(sys.argv[1:]))
"""
"""``src/gpt2.py`` that takes its time until both machines are there again."""
AGENT = """
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
number, port, *words = sys.argv[1:]
peers.OBSERVED_SEC = 1.0
dynamic_rendezvous.get_method_name = str  # for the log: it looks through all modules, which takes seconds here
os.environ |= {"PET_NNODES": "1:2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
Path(f"pid-{number}").write_text(str(os.getpid()))


def rank():
    if code := train(words):
        exit_rank(code)


elastic_launch(
    LaunchConfig(
        min_nodes=1, max_nodes=2, nproc_per_node=1, run_id="test", rdzv_backend="c10d", local_addr="127.0.0.1",
        rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs={"last_call_timeout": 1, "keep_alive_interval": 1},
        start_method="fork", monitor_interval=0.1,
    ),
    rank,
)()
"""


@pytest.fixture
def pool():
    with ThreadPoolExecutor(3) as threads:
        yield threads


def agents(pool: ThreadPoolExecutor, folder: Path, flags: list[str]) -> Callable[[int], "Future[int]"]:
    """Starts an agent of this machine; gives its exit code."""
    (folder / "agent.py").write_text(SLOWLY + AGENT)
    port = free_port()

    def start(number: int) -> "Future[int]":
        command = [number, port, *flags, "--resume"]
        ended = pool.submit(lambda: run_script(folder / "agent.py", command, cwd=folder).returncode)
        within((folder / f"pid-{number}").exists)  # the first one keeps the place where they meet
        return ended

    return start


def on_hosts(hosts, pool: ThreadPoolExecutor, folder: Path, flags: list[str]) -> Callable[[int], "Future[int]"]:
    """Starts ``launch/torchrun.sh`` on a host; gives its exit code."""
    own = {"launch/torchrun.sh": (REPOSITORY / "launch" / "torchrun.sh").read_text(), "src/gpt2.py": SLOWLY}
    for name, text in own.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"NODES": "1:2", "PET_RDZV_CONF": "last_call_timeout=5", "MASTER": hosts.address(0), "PATH": path}
    variables |= {"DEVICES": "2" if "pipeline" in str(flags) else "1"}

    def start(number: int) -> "Future[int]":
        command = ["sh", folder / "launch" / "torchrun.sh", *flags]
        process = hosts.start(number, *command, log=folder / "log", cwd=folder, variables=variables)
        return pool.submit(process.wait)

    return start


@pytest.mark.long
@pytest.mark.parametrize(("where", "recipe"), [("agents", "recipe"), ("hosts", "zero3"), ("hosts", "pipeline")])
def test_a_planned_run_goes_on_after_a_loss_and_with_more_after_a_return(request, pool, here, tmp_path, where, recipe):
    """The recipe has micro batch and accumulation for two devices, as that of a plan has, and DDP has a plan."""
    run, each = tmp_path / "run", 2 if recipe == "pipeline" else 1
    plan = {"plan": here / "plan.json"} if recipe == "recipe" else {}
    flags = words(here, run, recipe, **plan)
    hosts = request.getfixturevalue("hosts") if where == "hosts" else None
    start = on_hosts(hosts, pool, tmp_path, flags) if hosts else agents(pool, tmp_path, flags)

    def processes(number: int) -> list[int]:
        if hosts:
            return hosts.processes(number)
        agent = psutil.Process(int((tmp_path / f"pid-{number}").read_text()))
        return [process.pid for process in (agent, *agent.children(recursive=True))]

    def train_on(ranks: int, *, steps: int) -> None:
        within((run / "training_metrics.json").exists, seconds=240)
        within(
            lambda: (
                read_record(run)["segments"][-1]["hardware"]["world_size"] == ranks
                and max((line["step"] for line in read_lines(run)), default=0) >= steps
            ),
            seconds=240,
        )

    started = [start(0), start(1)]
    try:
        train_on(2 * each, steps=12)
        for process in processes(1):
            os.kill(process, 9)
        started[1].result(timeout=30)
        train_on(each, steps=13)
        started[1] = start(1)
        train_on(2 * each, steps=15)
        (tmp_path / "returned").touch()
        assert [one.result(timeout=240) for one in started] == [0, 0]
    finally:
        for process in (process for number in range(2) if not started[number].done() for process in processes(number)):
            os.kill(process, 9)
    log = (run / "train.log").read_text()
    lost, grown = rf"\(\S+ on {2 * each} ranks\) as \S+ on {each} rank", r"stopped by SIGTERM after step (\d+)"
    assert re.search(rf"{lost}.*{grown}.*step-0*\1 \(\S+ on {each} rank", log, re.DOTALL)
    assert ("plan        was made for 2 devices: steps are not compared with it" in log) == bool(plan)
    assert (read_record(run)["plan"] or {}).get("comparable") == (True if plan else None)
    assert_same_as_undisturbed(run, flags, ranks=2 * each)


@pytest.mark.long
def test_torchrun_does_not_start_a_run_again_that_reached_its_limit(pool, here, tmp_path):
    run = tmp_path / "run"
    start = agents(pool, tmp_path, words(here, run, max_train_steps=1000, max_hours=0.01))
    assert start(0).result(timeout=120) != 0
    log = (run / "train.log").read_text()
    assert (log.count("stopped by --max_hours 0.01 after step"), log.count("resuming from")) == (1, 0)
