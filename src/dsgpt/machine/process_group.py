"""The process group of all ranks. Without a group, every function acts as for a single rank."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsgpt.common.errors import UserError
from dsgpt.machine.topology import Topology, free_port

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others: rank 0 may be hashing data or writing a checkpoint."""


@contextlib.contextmanager
def joined(topology: Topology, device: torch.device) -> Iterator[None]:
    """Form the group of all ranks, over nccl on GPUs and gloo on CPU, and destroy it at the end.

    A process without a launcher forms a group of one rank, because DeepSpeed needs a group. It overwrites ``RANK``
    and related variables, which an earlier job may have left. After an error the group is not destroyed: that could
    wait for ranks that are gone.

    Raises:
        UserError: the variables do not say where the ranks meet.
    """
    if topology.launcher == "python":
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
        )
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(f"not set: {', '.join(missing)}, where the ranks meet: start them with a launcher")
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        rank=topology.rank,
        world_size=topology.world_size,
        store=_store_of_a_restart(),
        timeout=TIMEOUT,
        device_id=device if on_gpu else None,
    )
    yield
    dist.destroy_process_group()


def _store_of_a_restart() -> "Store | None":
    """The store of ranks that ``torchrun --max-restarts`` restarted on one machine; None if PyTorch's own can be used.

    With ``--master_port`` PyTorch 2.13 keeps one store for all attempts, with the same keys
    (``static_tcp_rendezvous.py``, ``_create_c10d_store``): restarted ranks would read the addresses of dead ones.
    Launchers on several machines count attempts differently, and make a new store for each attempt.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    of_the_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if attempt == "0" or not of_the_launcher or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    # Both are documented as public; only the types do not mark them as exported.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
    own: Store = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    return own


class HostGroup:
    """A gloo group of all ranks on any device: nothing here waits for a GPU. Collective: every rank must create one."""

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if several else None

    def largest(self, value: int) -> int:
        """The largest ``value`` of any rank, on every rank."""
        if self._group is None:
            return value
        box = torch.tensor(value)
        dist.all_reduce(box, op=dist.ReduceOp.MAX, group=self._group)
        return int(box)

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's ``values``, in rank order, on every rank; equally many on each."""
        if self._group is None:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        boxes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(boxes, own, group=self._group)
        return [box.tolist() for box in boxes]


def barrier() -> None:
    """Wait until every rank has called this."""
    if dist.is_initialized():
        dist.barrier()


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum ``value`` over all ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def gather_objects(value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order, on every rank. For small values only: they are pickled."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_main(value: Any) -> Any:
    """Rank 0's ``value``, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
