"""Rank, world size and parallel sizes, from the environment variables that launchers set. Imports no torch."""

import contextlib
import os
import random
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsgpt.common.errors import UserError

_PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000
_FIRST_PORT_OF_MOST_SYSTEMS = 32_768


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Ranks that share one copy of the model, for each way of splitting it. Copies are data parallel."""

    tensor: int = 1
    """Ranks that hold a shard of every matrix."""
    pipeline: int = 1
    """Stages: ranks that hold different layers."""
    sequence: int = 1
    """Ranks that read different positions of the same sequences."""

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that together train on the same micro batch."""
        return self.tensor * self.pipeline * self.sequence

    def __str__(self) -> str:
        """``pipeline 2 x tensor 2``; ``1`` if nothing is split."""
        split = {"pipeline": self.pipeline, "sequence": self.sequence, "tensor": self.tensor}
        return " x ".join(f"{name} {size}" for name, size in split.items() if size > 1) or "1"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The place of one process in the run.

    Ranks are laid out, from the outermost to the innermost, by pipeline stage, data, sequence and tensor: tensor ranks
    communicate most and are neighbours. DeepSpeed's layouts (``PipeModelDataParallelTopology``, AutoTP, Ulysses) are
    the same.
    """

    rank: int
    """Among all processes of the run, from 0."""
    local_rank: int
    """Among the processes of this machine, from 0; the index of its GPU."""
    world_size: int
    """Processes that train; a process is a device: one GPU, or a share of the CPU."""
    local_world_size: int
    """Processes on this machine that train; on all machines equally many, but for the last one if there are spares."""
    launcher: str
    """``python`` (none), ``deepspeed``, ``torchrun``, ``slurm``, or ``launcher`` for any other that sets ``RANK``."""
    sizes: ParallelSizes = field(default=ParallelSizes())
    """Sizes of the model's splits; they come from the recipe, not from the launcher."""
    machines: tuple[int, int] | None = None
    """The fewest and the most machines of an elastic launch; None if their number is fixed."""
    spares: int = 0
    """Processes of an elastic launch that wait, because only ``world_size`` of those started split the global batch."""

    def split(self, sizes: ParallelSizes) -> "Topology":
        """This topology with the model split by ``sizes``, whose product divides ``world_size``."""
        return replace(self, sizes=sizes)

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of ranks that share a copy of the model, that read different data."""
        return self.world_size // self.sizes.ranks_per_copy

    @property
    def tensor_rank(self) -> int:
        """Index of this rank's shard of every split matrix."""
        return self.rank % self.sizes.tensor

    @property
    def sequence_rank(self) -> int:
        """Index of the part of every sequence that this rank reads."""
        return self.rank // self.sizes.tensor % self.sizes.sequence

    @property
    def data_rank(self) -> int:
        """Index of the share of every global batch that this rank reads."""
        return self.rank // (self.sizes.tensor * self.sizes.sequence) % self.data_parallel_size

    @property
    def stage(self) -> int:
        """Index of the pipeline stage that this rank holds."""
        return self.rank // (self.sizes.tensor * self.sizes.sequence * self.data_parallel_size)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes the records."""
        return self.rank == 0

    @property
    def machine(self) -> int:
        """Index of this process's machine; 0 is that of rank 0."""
        return self.rank // self.local_world_size

    @property
    def is_spare(self) -> bool:
        """Whether this process waits instead of training."""
        return self.rank >= self.world_size

    @property
    def started(self) -> int:
        """Processes of the launch, spares included."""
        return self.world_size + self.spares


def read_topology(environment: Mapping[str, str] = os.environ, *, local_rank_flag: int | None = None) -> Topology:
    """The topology from the launcher's variables; a single process if there is no launcher.

    Args:
        environment: the environment variables; ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` are
            read, those that tell launchers apart, and torchrun's ``PET_NNODES``, which is ``MIN:MAX`` if it is elastic.
        local_rank_flag: ``--local_rank``, which older launchers pass instead of ``LOCAL_RANK``.

    Raises:
        UserError: a variable is not a whole number, or contradicts another.
    """
    world_size = _whole(environment, "WORLD_SIZE", 1)
    rank = _whole(environment, "RANK", 0)
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher = "torchrun"
    elif "RANK" not in environment:
        launcher = "python"
    elif "CROSS_RANK" in environment or "LOCAL_SIZE" in environment:
        launcher = "deepspeed"
    else:
        launcher = "slurm" if "SLURM_PROCID" in environment else "launcher"
    way_out = "start the ranks with a launcher, or unset the launcher's variables"
    if world_size > 1 and "RANK" not in environment:
        raise UserError(f"the variable WORLD_SIZE is {world_size}, but RANK is not set: {way_out}")
    if rank >= world_size:
        raise UserError(f"the variable RANK is {rank}, but WORLD_SIZE is {world_size}: {way_out}")
    elastic = re.fullmatch(r"(\d+):(\d+)", environment.get("PET_NNODES", ""))
    return Topology(
        rank=rank,
        local_rank=_whole(environment, "LOCAL_RANK", max(0, local_rank_flag or 0)),
        world_size=world_size,
        local_world_size=_whole(environment, "LOCAL_WORLD_SIZE", _whole(environment, "LOCAL_SIZE", world_size)),
        launcher=launcher,
        machines=(int(elastic[1]), int(elastic[2])) if elastic and "RANK" in environment else None,
    )


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    word = environment.get(name)
    if word is not None and not word.isdecimal():
        cure = "start the ranks with a launcher, or unset it"
        raise UserError(f"the variable {name} is {word!r}, not a whole number: {cure}")
    return default if word is None else int(word)


def free_port() -> int:
    """A free TCP port of this machine, for the ranks' rendezvous, which begins seconds later.

    It lies below the ports that the system gives to connections: one of those could be taken before the ranks meet.
    """
    end = _FIRST_PORT_OF_MOST_SYSTEMS
    with contextlib.suppress(OSError):  # another system than Linux
        end = int(_PORTS_OF_CONNECTIONS.read_text(encoding="ascii").split()[0])
    ports = range(_FIRST_PORT, end)
    for port in (*random.SystemRandom().sample(ports, len(ports)), 0):  # 0: one that the system chooses
        with socket.socket() as probe, contextlib.suppress(OSError):  # it is taken
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise UserError("this machine has no free TCP port for the ranks to meet at: end programs that hold some")


# Bytes that a rank sends, from the payload of a collective operation.

_RING_FACTORS = {
    "all_reduce": (2, 1),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"), (1, 1)),
    **dict.fromkeys(("broadcast", "reduce", "send"), (1, 0)),
    **dict.fromkeys(("recv", "barrier"), (0, 0)),
}
"""(a, b) of the factor a (n - b) / n among n ranks."""


def ring_factor(operation: str, group_size: int) -> float:
    """Bytes that a rank sends per byte of payload; 0 in a group of one.

    The payload is what a rank receives from an all-gather, what it gives to a reduce-scatter or all-to-all, and the
    tensor of any other operation. The factors are those of the bus bandwidth of NCCL's tests
    (``nccl-tests/doc/PERFORMANCE.md``): 2(n-1)/n for an all-reduce, (n-1)/n for all-gather, reduce-scatter, all-to-all,
    gather and scatter, 1 for broadcast, reduce and send. What a rank receives is counted at the rank that sent it.
    """
    factor, missing = _RING_FACTORS[operation]
    return 0.0 if group_size == 1 else factor * (group_size - missing) / group_size
