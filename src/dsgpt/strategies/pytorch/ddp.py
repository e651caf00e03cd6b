"""PyTorch's DistributedDataParallel: every rank holds the whole model, and gradients are averaged over the ranks.

Gradients are reduced in buckets, each as soon as the backward pass has filled it, in the last micro batch of a step
only. In bf16 and fp16 they are summed over micro batches and ranks in fp32, as the baseline sums its own.
"""

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # ``torch.distributed`` re-exports it, but not to type checkers
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dsgpt.checkpointing.training_state import StateReader
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch
from dsgpt.strategies.base import StateTensors
from dsgpt.strategies.initial_weights import DTYPES
from dsgpt.strategies.pytorch.baseline import whole_model
from dsgpt.strategies.pytorch.master_weights import MasterWeights
from dsgpt.strategies.pytorch.torch_strategy import TorchStrategy, compile_blocks


class Ddp(TorchStrategy):
    """Whole copies of the model, one per rank, kept equal by averaging their gradients."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        model = whole_model(config, device)
        weights = MasterWeights(model, DTYPES[config.precision])
        super().__init__(config, device, model=model, weights=weights)
        self._batch_shape = (config.batch.micro_batch_size, config.seq_length)
        self._low = list(model.parameters()) if weights.separate else []
        self._masters = weights.by_low_parameter() if weights.separate else {}
        self._buckets: list[Tensor] = []
        if config.options.compile:
            # With ``optimize_ddp`` PyTorch would cut each block's graph at the ends of buckets, and fails on buckets
            # under 1 MiB. Buckets are reduced early enough between compiled blocks.
            torch._dynamo.config.optimize_ddp = False
            compile_blocks(model)
        self._ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=config.recipe.dsgpt.ddp.bucket_cap_mb,
            gradient_as_bucket_view=config.recipe.dsgpt.ddp.gradient_as_bucket_view,
            init_sync=False,  # every rank makes the same initial weights itself
        )
        self._ddp.register_comm_hook(self, Ddp._average)

    def _average(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: called with every bucket as soon as it is full, in a step's last micro batch."""
        self._buckets.append(bucket.buffer())
        if self._masters:
            return average_in_fp32(self._masters, bucket)
        return allreduce_hook(self._ddp.process_group, bucket)

    def _training_loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self._ddp(batch.inputs, batch.targets)
        return loss

    @contextlib.contextmanager
    def _micro_batch(self, *, last: bool) -> Iterator[None]:
        self._buckets.clear()  # those of the step before; DDP makes new ones after the first
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            yield
        if last:
            for parameter in self._low:
                parameter.grad = None  # the master's gradient already holds the average, not rounded

    def load_state(self, reader: StateReader) -> None:
        """See ``Strategy``."""
        super().load_state(reader)
        self._order_buckets()

    def _order_buckets(self) -> None:
        """Make DDP arrange its buckets as they are from the second step of a process on.

        DDP rearranges them after the first backward pass. The position of an element in its bucket decides in which
        order three or more ranks add it up. Without this, the first step of a resumed run would differ from that of an
        uninterrupted run in the last bit.
        """
        tokens = torch.zeros(self._batch_shape, dtype=torch.long, device=self._device)
        with self._micro_batch(last=True):
            torch.autograd.backward(self._training_loss(Batch(inputs=tokens, targets=tokens)))
        self._optimizer.zero_grad()

    def state_tensors(self) -> StateTensors:
        """See ``Strategy``."""
        return super().state_tensors()._replace(buffers=list(self._buckets))


def average_in_fp32(masters: Mapping[Tensor, nn.Parameter], bucket: GradBucket) -> Future[Tensor]:
    """Leave the mean over ranks of a bucket's gradients in the masters, in fp32.

    A master's gradient holds the sum of the earlier micro batches; the bucket has the last one's. DDP writes the hook's
    result into the low-precision gradients, which are not read.

    Args:
        masters: from the model's low-precision parameters to the fp32 ones.
        bucket: gradients of some of the parameters, flat in one buffer, in the order of ``bucket.parameters()``.
    """
    low = bucket.buffer()
    flat = low.float()
    parameters = bucket.parameters()
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        master = masters[parameter]
        gradient = part.view_as(master)
        if master.grad is not None:
            gradient += master.grad
        master.grad = gradient  # a view of ``flat``, which is reduced in place below
    flat /= dist.get_world_size()
    reduced: Future[Tensor] = dist.all_reduce(flat, async_op=True).get_future().then(lambda _: low)
    return reduced
