"""Hosts with networks of their own, and a real Slurm of two nodes, on this machine."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_run import REPOSITORY, within
from system_packages import DAEMONS

from dsgpt.benchmarks.hosts import Hosts, NoHosts, made_hosts
from dsgpt.machine.topology import free_port

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1
NodeName=n1 NodeHostname=localhost Port={first} CPUs=2
NodeName=n2 NodeHostname=localhost Port={second} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""A requeued job may start when the credentials of its earlier start have expired: after 5 s instead of two minutes."""


RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Slurm:
    """The commands of a running Slurm."""

    folder: Path

    def __call__(self, *words: object, cwd: Path | None = None, **variables: str) -> str:
        """What a command of Slurm prints."""
        # A training in this process may have left variables of its group; with its port no job could meet.
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment |= {"SLURM_CONF": str(self.folder / "slurm.conf")} | variables
        command = list(map(str, words))
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *words: object, options: tuple[str, ...] = (), variables: Mapping[str, str] | None = None) -> str:
        """Submit ``launch/slurm/train.sbatch`` for two nodes, with flags of ``src/gpt2.py``; returns the job."""
        exported = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} | dict(variables or {})
        names = ",".join(f"{name}={value}" for name, value in exported.items())
        script = REPOSITORY / "launch" / "slurm" / "train.sbatch"
        where = ("--parsable", "--chdir", REPOSITORY, "--output", self.folder / "%A-%a.log")
        return self("sbatch", *where, "--nodes=2", f"--export=ALL,{names}", *options, script, *words).strip()

    def states(self, job: str) -> set[str]:
        """``RUNNING``, ``PENDING``, ``COMPLETED``, ... of a job; of an array those of its tasks."""
        return set(re.findall(r"JobState=(\w+)", self("scontrol", "show", "job", job)))

    def wait_for(self, job: str, state: str, *, seconds: float = 120) -> None:
        """Wait until a job, or every task of an array, is in a state."""
        within(lambda: self.states(job) == {state}, seconds=seconds)


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """As many hosts as ``HOSTS`` of the module says; skips its tests where none can be made."""
    try:
        with made_hosts(request.module.HOSTS) as made:
            yield made
    except NoHosts as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes that Slurm believes to be machines; their daemons end with the tests."""
    for package, name in DAEMONS.items():
        if not shutil.which(name):
            pytest.skip(f"needs {package}")
    if os.geteuid() != 0:
        pytest.skip("only root can start Slurm")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    ports = {name: free_port() for name in ("controller", "first", "second")}
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, **ports))
    tool, daemons = Slurm(folder), list[subprocess.Popen[bytes]]()
    try:
        daemons.append(_munged(folder))
        for command in (["slurmctld", "-i"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
            daemons.append(subprocess.Popen(
                [command[0], "-D", "-f", configuration, *command[1:]],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            ))  # fmt: skip
        within(
            lambda: "idle" in tool("sinfo", "--noheader", "--format", "%T %D") if daemons[1].poll() is None else False
        )
        try:
            yield tool
        finally:
            tool("scancel", "--full", "--user", "root")
            within(lambda: not tool("squeue", "--noheader"), seconds=60)
    finally:
        for daemon in daemons[::-1]:
            daemon.terminate()
            daemon.wait(timeout=30)


def _munged(folder: Path) -> "subprocess.Popen[bytes]":
    """Munge's daemon, which vouches for the users of this Slurm; the system's own is left alone."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log"}
    paths = [f"--{flag}={folder / name}" for flag, name in (files | {"seed-file": "munge.seed"}).items()]
    daemon = subprocess.Popen(["munged", "--foreground", "--force", *paths], stderr=subprocess.DEVNULL)
    within((folder / "munge.socket").exists, seconds=30)
    return daemon
