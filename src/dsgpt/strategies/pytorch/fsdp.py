"""PyTorch's FSDP2 (``fully_shard``): weights, gradients and optimizer state are cut into one shard per rank.

Every parameter is cut along its first dimension. A block's weights are gathered before it computes and freed after it;
gradients are averaged over the ranks and scattered as shards. The shards are fp32 in every precision: they are the
master weights, and they are gathered in the precision of the computation.
"""

import contextlib
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import Batch
from dsgpt.model.gpt2 import GPT2
from dsgpt.optimization.optimizer import square_sum
from dsgpt.strategies.base import StateTensors, optimizer_tensors
from dsgpt.strategies.initial_weights import DTYPES, initial_values
from dsgpt.strategies.pytorch.torch_strategy import TorchStrategy, compile_blocks


class Fsdp(TorchStrategy):
    """Each rank holds one shard of all weights, gradients and optimizer state."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        model = sharded_model(config, device)
        self._shards = ShardedWeights(model)
        super().__init__(config, device, model=model, weights=self._shards)
        assert isinstance(model, FSDPModule)  # ``fully_shard`` gives a module this class too
        self._fully_sharded: FSDPModule = model
        self._reshard_after_forward = config.recipe.dsgpt.fsdp.reshard_after_forward
        self._rank = config.topology.rank

    def _micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Until the ``last`` micro batch, every rank sums whole gradients; then they are reduced to shards.

        Weights that stay gathered between forward and backward pass also stay gathered until the next micro batch:
        their memory is needed anyway, and they need not be gathered again. The root's weights always stay; those of the
        blocks stay if the recipe says so.
        """
        self._fully_sharded.set_requires_gradient_sync(last)
        self._fully_sharded.set_reshard_after_backward(last or self._reshard_after_forward)
        self._fully_sharded.set_reshard_after_backward(last, recurse=False)
        return contextlib.nullcontext()

    def _global_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The norm over all ranks. No two ranks hold the same element, so its square is the sum of their squares."""
        return self._sum_over_ranks(square_sum(gradients).to(self._device)).sqrt().float()

    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        sums = super().eval_step(batches)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # in training, the backward pass does it
        return sums

    def _whole(self, name: str, part: Tensor) -> Tensor:
        return self._shards.whole(name, part)

    def _part(self, whole: Tensor) -> Tensor:
        return _own_rows(whole, self._rank, self._ranks)

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy``: none, except on a single rank, whose shards are whole."""
        if self._ranks == 1:
            for name, parameter in self._weights.parameters.items():
                yield name, parameter.detach()

    def state_tensors(self) -> StateTensors:
        """See ``Strategy``; the optimizer changes the fp32 shards that are gathered."""
        shards = list(self._weights.parameters.values())
        return StateTensors(
            parameters=[shard.detach() for shard in shards],
            gradients=[shard.grad for shard in shards if shard.grad is not None],
            optimizer=optimizer_tensors(self._optimizer),
            master=[],
            buffers=[],
        )


class ShardedWeights:
    """The shards of a model under ``fully_shard`` as plain tensors, which share their memory.

    Optimizers take their fast path on plain tensors only, and no operation on plain tensors can hide a collective.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sharded = {name: _dtensor(parameter) for name, parameter in model.named_parameters()}
        with torch.no_grad():
            self.parameters = {name: nn.Parameter(sharded.to_local()) for name, sharded in self._sharded.items()}
        """Canonical name to this rank's shard, fp32; empty where a parameter has fewer rows than there are ranks."""

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Move the gradients' shards to ``parameters``; there are none before the last micro batch of a step."""
        for name, sharded in self._sharded.items():
            if sharded.grad is not None:
                self.parameters[name].grad = _dtensor(sharded.grad).to_local()
                sharded.grad = None

    def publish(self) -> None:
        """Nothing to do: the next forward pass gathers the changed shards."""

    @torch.no_grad()
    def replace(self, name: str, value: Tensor) -> None:
        """Set this rank's shard of one weight."""
        self.parameters[name].copy_(value)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Gather a tensor that is cut like the parameter ``name`` from each rank's ``part``; collective."""
        like = self._sharded[name]
        mesh, cut = like.device_mesh, like.placements
        return DTensor.from_local(part, mesh, cut, shape=like.shape, stride=like.stride()).full_tensor()


def _dtensor(value: Tensor) -> DTensor:
    """``value`` itself: ``fully_shard`` turned the parameters, and so their gradients, into DTensors."""
    assert isinstance(value, DTensor)
    return value


def sharded_model(config: RunConfig, device: torch.device) -> GPT2:
    """The model with its initial weights, cut over all ranks; no rank ever holds all of it.

    It is built without storage, cut, and filled parameter by parameter.
    """
    recipe, low = config.recipe.dsgpt.fsdp, DTYPES[config.precision]
    with torch.device("meta"):
        model = GPT2(config.model, activation_checkpointing=config.activation_checkpointing)
    if config.options.compile:
        compile_blocks(model)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if recipe.cpu_offload else OffloadPolicy()
    reduce_dtype = torch.float32 if recipe.reduce_dtype == "fp32" else low
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(device.type, (config.topology.world_size,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype),
        offload_policy=offload,
    )
    for block in model.blocks:
        shard(block, reshard_after_forward=recipe.reshard_after_forward)
    shard(model, reshard_after_forward=False)  # the backward pass first needs the weights that the forward used last
    _fill(model, config, torch.device("cpu") if recipe.cpu_offload else device)
    return model


@torch.no_grad()
def _fill(model: GPT2, config: RunConfig, home: torch.device) -> None:
    """Give this rank's shards storage on ``home`` and their initial values; tied parameters stay tied."""
    values = initial_values(config)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    shards = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in filled:
            whole = values(name, parameter.shape)
            rows = _own_rows(whole, config.topology.rank, config.topology.world_size)
            shard = torch.empty_like(parameter, device=home)
            # Master weights start rounded to the precision of the computation, as under every strategy.
            _dtensor(shard).to_local().copy_(rows.to(DTYPES[config.precision]))
            filled[parameter] = nn.Parameter(shard)
        shards[name] = filled[parameter]
    model.load_state_dict(shards, assign=True)


def _own_rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of ``whole`` that ``Shard(0)`` gives ``rank``: equal numbers of rows, the last ranks fewer or none."""
    rows = -(-whole.shape[0] // ranks)
    return whole[rank * rows : (rank + 1) * rows]
