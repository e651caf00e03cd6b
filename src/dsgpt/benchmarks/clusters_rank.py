"""A process on a host of ``benchmark.py clusters``: a rank or torchrun's agent, and the fault that is planted there.

The campaign forks most of them from a process that has imported torch and DeepSpeed. Launchers start the others.
"""

import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from dsgpt.benchmarks.clusters import LIMIT_SEC, LOST, PAUSE_SEC, SLOW_MBIT, Fault
from dsgpt.benchmarks.hosts import Hosts, enter
from dsgpt.common.files import write_json_atomic
from dsgpt.machine import peers, spot
from dsgpt.machine.launcher import exit_rank
from dsgpt.machine.topology import Topology
from dsgpt.model.gpt2 import Head
from dsgpt.training import trainer
from dsgpt.training.command import train

PLAN = "CLUSTERS_PLAN"
"""The environment variable with the fault as JSON, and ``folder``, that of its run."""
BALLAST, SERVER = "ballast", "server.pid"
"""Files in the folder of a fault: what fills its disk, below ``shared``; the process of its FUSE folder."""
PACE_SEC = 0.1
"""Seconds added to every step, so that a fault meets a run of some seconds."""


def be_host(
    hosts: Hosts,
    number: int,
    words: Sequence[str],
    *,
    variables: Mapping[str, str],
    log: Path,
    agent: Sequence[str] | None,
) -> None:
    """Move this forked process to a host; be a rank there, or torchrun's agent, which forks its rank.

    Args:
        hosts: all of them.
        number: of the host.
        words: flags of ``src/gpt2.py``.
        variables: the whole environment.
        log: what it prints is appended there.
        agent: flags of torchrun; None for a rank without a launcher.
    """
    gc.freeze()  # else every collection copies the memory of all that was imported
    os.setsid()
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(variables)
    enter(hosts.host(number), hosts.names)
    sys.argv = ["src/gpt2.py", *words]
    if agent is None:
        main()
        exit_rank(0)
    config, _, _ = config_from_args(parse_args([*agent, *sys.argv]))  # type: ignore[no-untyped-call]
    config.start_method = "fork"
    elastic_launch(config, main)()


def main() -> None:
    """Be ``src/gpt2.py`` with the planted fault; returns after a success, and ends the process after a failure."""
    plan = json.loads(os.environ[PLAN])
    folder = Path(plan.pop("folder"))
    plant(Fault(**plan), folder)
    if code := train(sys.argv[1:]):
        exit_rank(code)


def plant(fault: Fault, folder: Path) -> None:
    """Lower the limits of this process, and let the fault strike if it is on the host of it."""
    here = int(socket.gethostname().rsplit("-", 1)[1])
    if fault.limit_sec == LIMIT_SEC:
        begin = peers.Peers.__init__
        peers.OBSERVED_SEC, spot.POLL_SEC = 3.0, 0.5
        peers.JOIN_SEC = 30.0 if fault.kind == "second fault" else 180.0

        def impatient(own: peers.Peers, topology: Topology, **_: float) -> None:
            begin(own, topology, stall_timeout=LIMIT_SEC)  # the flag takes no less than 20 s

        peers.Peers.__init__ = impatient  # type: ignore[method-assign,assignment]
    poisons = Head if fault.how == "loss" else nn.LayerNorm
    watch, forward, poison = trainer.Measurements.watch, poisons.forward, threading.Event()

    def watched(measurements: trainer.Measurements, step: int) -> Any:
        time.sleep(PACE_SEC)
        poison.clear()
        if step == fault.step and here == fault.host and fault.strikes and not mark(folder, 1).exists():
            if fault.delay and fault.second is None:
                threading.Timer(fault.delay, strike, (fault, folder, 1, poison)).start()
            else:
                strike(fault, folder, 1, poison)
        return watch(measurements, step)

    def poisoned(*given: Any) -> Tensor:
        return forward(*given) * (float("nan") if poison.is_set() else 1.0)

    trainer.Measurements.watch = watched  # type: ignore[method-assign,assignment]
    if fault.kind == "NaN":
        poisons.forward = poisoned  # type: ignore[method-assign,assignment]
    number = len(list(folder.glob(mark(folder, 0).name.replace("0", "*")))) + 1
    if here == fault.host and fault.every_sec:
        delay = random.Random(f"{fault.index}/{number}").expovariate(1 / fault.every_sec)
        threading.Timer(delay, strike, (fault, folder, number, poison)).start()
    if here == fault.second and mark(folder, 1).exists() and not mark(folder, 2).exists():
        threading.Timer(fault.delay, strike, (fault, folder, 2, poison)).start()


def mark(folder: Path, number: int) -> Path:
    """The file that says when the first or second fault struck."""
    return folder / f"struck-{number}.json"


def strike(fault: Fault, folder: Path, number: int, poison: threading.Event) -> None:
    """Do what the fault does to this host."""
    name, own = socket.gethostname().rsplit("-", 1)
    hosts, here = Hosts(name, 0), int(own)
    write_json_atomic(mark(folder, number), {"time": time.time()})
    if fault.kind in {"host killed", "second fault"}:
        hosts.unplug(here)  # else its system would tell the others
        for process in sorted(hosts.processes(here), key=os.getpid().__eq__):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    elif fault.kind == "link cut":
        hosts.unplug(here)
    elif fault.kind == "link slow":
        hosts.shape(here, mbit=SLOW_MBIT)
    elif fault.kind == "packets lost":
        hosts.shape(here, loss=LOST)
    elif fault.kind == "rank stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind == "NaN":
        poison.set()
    elif fault.kind == "disk full":
        with (folder / "shared" / BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(os.sysconf("SC_PAGE_SIZE"))):
                pass
    elif fault.kind == "folder stands still":
        server = (folder / SERVER).read_text()
        os.kill(int(server), signal.SIGSTOP)
        later = f"sleep {PAUSE_SEC}; kill -CONT {server}"
        subprocess.Popen(["sh", "-c", later], start_new_session=True)
    elif fault.how == "spot notice":
        (folder / f"notice-{here}").touch()
    else:
        os.kill(os.getpid(), signal.Signals[fault.how])
