"""Strategies of plain PyTorch: one device, DDP, FSDP. They never import DeepSpeed.

Baseline, DDP and FSDP differ only in which rank holds which weights and in how gradients are reduced. Optimizer,
schedule, clipping, accumulation and loss scale are the same.

Low-precision weights to compute with, fp32 weights to train: what bf16 and fp16 mean in plain PyTorch. Parameters and
activations are in the low precision; the optimizer, its copy of the weights, the sum of the micro batches' gradients
and the loss are fp32 (Micikevicius et al. 2018, "Mixed precision training", sections 3.1 to 3.3).

PyTorch's DistributedDataParallel: every rank holds the whole model, and gradients are averaged over the ranks.
Gradients are reduced in buckets, each as soon as the backward pass has filled it, in the last micro batch of a step
only. In bf16 and fp16 they are summed over micro batches and ranks in fp32, as the baseline sums its own.

PyTorch's FSDP2 (``fully_shard``): weights, gradients and optimizer state are cut into one shard per rank. Every
parameter is cut along its first dimension. A block's weights are gathered before it computes and freed after it;
gradients are averaged over the ranks and scattered as shards. The shards are fp32 in every precision: they are the
master weights, and they are gathered in the precision of the computation.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # ``torch.distributed`` re-exports it, but not to type checkers
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from dsgpt.checkpoints.pieces import Box
from dsgpt.checkpoints.training_state import ParamState, Shards, StateReader
from dsgpt.config.run_config import RunConfig
from dsgpt.data.loader import IGNORED_TARGET, Batch
from dsgpt.formats.tensor_files import DTYPES
from dsgpt.machine.device import named_range, sum_over_ranks
from dsgpt.model.config import STATE_NAMES
from dsgpt.model.gpt2 import GPT2, parameter_shapes
from dsgpt.strategies import base
from dsgpt.strategies.exact import exact_sums
from dsgpt.telemetry.meter import StepResult


class MasterWeights:
    """An fp32 copy of the weights of ``model``, which is converted to ``dtype`` in place; in fp32, its own weights."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.separate = dtype != torch.float32
        """Whether there are two copies of every weight."""
        if self.separate:
            model.to(dtype)
        self._low = self.parameters = dict(model.named_parameters())
        """``parameters``: canonical name to the plain fp32 tensor that the optimizer changes, all or a rank's part."""
        if self.separate:
            self.parameters = {name: nn.Parameter(value.detach().float()) for name, value in self._low.items()}

    def gather_gradients(self) -> None:
        """Add the gradients of a backward pass to those of ``parameters``; call it after every backward pass."""
        if not self.separate:
            return
        begun: list[tuple[Tensor, Tensor]] = []
        continued: list[tuple[Tensor, Tensor]] = []
        for name, low in self._low.items():
            if low.grad is not None:
                master = self.parameters[name]
                kind = begun if master.grad is None else continued
                master.grad = torch.empty_like(master) if master.grad is None else master.grad
                kind.append((master.grad, low.grad))
                low.grad = None
        for add, pairs in ((torch._foreach_copy_, begun), (torch._foreach_add_, continued)):
            if pairs:
                sums, parts = zip(*pairs, strict=True)
                add(sums, parts)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the changed master weights into the model; call it after every optimizer step."""
        if self.separate:
            torch._foreach_copy_(list(self._low.values()), list(self.parameters.values()))

    @torch.no_grad()
    def replace(self, name: str, value: Tensor) -> None:
        """Set one weight, in the master copy and in the model."""
        self.parameters[name].copy_(value)
        if self.separate:
            self._low[name].copy_(value)


class TorchStrategy(base.Strategy):
    """One optimizer step in plain PyTorch; a subclass builds the model and reduces its gradients.

    Args:
        config: the run.
        device: of this rank.
        model: computes the loss of a micro batch.
        weights: the fp32 weights that the optimizer changes, all or this rank's part.
    """

    def __init__(self, config: RunConfig, device: torch.device, *, model: GPT2, weights: MasterWeights) -> None:
        super().__init__(config, device)
        self.model, self._weights = model, weights
        self._training_loss: nn.Module = model
        """Called with the inputs and targets of a micro batch."""
        self._rank, self._ranks = config.topology.rank, config.topology.world_size
        recipe, self._clipping = config.recipe.optimizer, config.recipe.gradient_clipping
        groups = base.parameter_groups(weights.parameters, recipe)
        self._optimizer = base.build_optimizer(groups, recipe, fused=not config.options.exact)
        if (exact := exact_sums(config)) is not None:
            exact.watch(model)
        self._exact = exact

    def train_step(self, batches: Iterator[Batch], step: int) -> StepResult:
        """See ``Strategy``."""
        self.model.train()
        lr = self._schedule(step)
        base.set_learning_rate(self._optimizer, lr)
        self._optimizer.zero_grad()
        loss_sum = torch.zeros((), device=self._device)
        for micro in range(self._accumulation):
            batch = base.to_device(next(batches), self._device)
            with self._micro_batch(last=micro == self._accumulation - 1):
                with named_range("forward"):
                    loss = self._training_loss(batch.inputs, batch.targets) / self._accumulation
                with named_range("backward"):
                    torch.autograd.backward(loss * self._scale.factor)
            self._weights.gather_gradients()
            loss_sum += loss.detach()
        with named_range("optimizer"):
            norm, overflow = self._clip_and_step()
        own_loss = loss_sum.clone()  # the sum is taken in place
        loss_mean = self._sum_over_ranks(loss_sum) / self._ranks
        if self._exact is not None:
            loss_mean = self._exact.mean_loss(self._device)
        return StepResult(loss_mean, own_loss, norm, lr, torch.tensor(overflow), self.model.take_gradient_sum())

    def _clip_and_step(self) -> tuple[Tensor, bool]:
        """Undo the loss scale, clip and step.

        Returns:
            The whole model's gradient norm before clipping, equal on all ranks, and whether it overflowed instead.
        """
        parameters = self._weights.parameters.values()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self._scale.factor != 1:
            for gradient in gradients:
                gradient.div_(self._scale.factor)
        norm = self._global_norm(gradients)
        if self._clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._clipping, norm)
        overflow = self._scale.enabled and not bool(torch.isfinite(norm))  # waits for the device, in fp16 only
        if not overflow:
            self._optimizer.step()
            self._optimizer_steps += 1
            self._weights.publish()
        self._scale.update(overflow=overflow)
        return norm, overflow

    def _micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - for subclasses
        """A context for one forward and backward pass; gradients are reduced over ranks in the ``last`` one only."""
        return contextlib.nullcontext()

    def _global_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        if self._exact is not None:
            return self._exact.norm(gradients, group=None, split=False)
        return base.global_norm(gradients)

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return sum_over_ranks(value) if self._ranks > 1 else value

    @torch.no_grad()
    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        self._optimizer.zero_grad()  # whole logits may need the memory of the last step's gradients
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # losses, targets
        for _ in range(self._accumulation):
            batch = base.to_device(next(batches), self._device)
            sums[0] += self.model(batch.inputs, batch.targets, reduction="sum")
            sums[1] += (batch.targets != IGNORED_TARGET).sum()
        loss_sum, tokens = self._sum_over_ranks(sums)
        return loss_sum, tokens

    def _param_states(self) -> Iterator[tuple[str, ParamState]]:
        """Yields name, weights and moments of each parameter, as this rank holds them."""
        for name, parameter in self._weights.parameters.items():
            moments = self._optimizer.state.get(parameter, {})
            yield name, ParamState(parameter.detach(), **{key: moments[key] for key in STATE_NAMES if key in moments})

    def shards(self) -> Shards:
        """See ``Strategy``; every rank holds everything, and writes an equal share."""
        boxes = {name: self._boxes(name) for name in self._weights.parameters}
        return Shards(boxes, self._param_states()).share(self._rank, self._ranks)

    def _boxes(self, name: str) -> list[Box]:
        """Boxes of this rank's part of the parameter ``name``, in the whole."""
        return [Box.whole(self._weights.parameters[name].shape)]

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy``."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def watch(self, watch: base.Watch, undo: contextlib.ExitStack) -> None:
        """See ``Strategy``."""
        undo.enter_context(base.watch_losses(self.model, watch))
        for name, parameter in self.model.named_parameters():
            hook = partial(watch.gradient, name, [Box.whole(parameter.shape)])
            undo.enter_context(parameter.register_hook(hook))  # type: ignore[no-untyped-call]  # torch's has no types

    def state_tensors(self) -> base.StateTensors:
        """See ``Strategy``."""
        computed_with, trained = list(self.model.parameters()), list(self._weights.parameters.values())
        return base.StateTensors(
            parameters=[parameter.detach() for parameter in computed_with],
            gradients=[parameter.grad for parameter in [*trained, *computed_with] if parameter.grad is not None],
            optimizer=base.optimizer_tensors(self._optimizer),
            master=[parameter.detach() for parameter in trained],  # in fp32 the parameters again, which count once
            buffers=[],
        )

    @torch.no_grad()
    def load_state(self, reader: StateReader) -> None:
        """See ``Strategy``."""
        super().load_state(reader)
        for name, parameter in self._weights.parameters.items():
            state = reader.state(name, self._boxes(name))
            self._weights.replace(name, state.weight.view(parameter.shape))
            if reader.has_moments:
                for key, moment in base.begin_state(self._optimizer, parameter, steps=self._optimizer_steps).items():
                    moment.copy_(state.moments[key].view(parameter.shape))


# The baseline: one process, plain PyTorch. Every other strategy is compared with it.


class Baseline(TorchStrategy):
    """Plain PyTorch on one device."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        model = base.whole_model(config).to(device)
        super().__init__(config, device, model=model, weights=MasterWeights(model, DTYPES[config.precision]))
        self._graphs = config.options.cuda_graphs
        if config.options.compile:
            self.model.compile(mode="reduce-overhead" if self._graphs else None)

    @contextlib.contextmanager
    def _micro_batch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """See ``TorchStrategy``; memory of a CUDA graph's results is used again from the next micro batch on."""
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        yield


class Ddp(TorchStrategy):
    """Whole copies of the model, one per rank, kept equal by averaging their gradients."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        model = base.whole_model(config).to(device)
        weights = MasterWeights(model, DTYPES[config.precision])
        super().__init__(config, device, model=model, weights=weights)
        self._batch_shape = (config.batch.micro_batch_size, config.seq_length)
        pairs = zip(model.parameters(), weights.parameters.values(), strict=True)
        self._masters: dict[Tensor, nn.Parameter] = dict(pairs) if weights.separate else {}
        """Master weights by the low-precision parameters of the model."""
        self._buckets: list[Tensor] = []
        if config.options.compile:
            # With ``optimize_ddp`` PyTorch would cut each block's graph at the ends of buckets, and fails on buckets
            # under 1 MiB. Buckets are reduced early enough between compiled blocks.
            torch._dynamo.config.optimize_ddp = False
            base.compile_blocks(model)
        self._training_loss = self._ddp = DistributedDataParallel(
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

    @contextlib.contextmanager
    def _micro_batch(self, *, last: bool) -> Iterator[None]:
        self._buckets.clear()  # those of the step before; DDP makes new ones after the first
        with contextlib.nullcontext() if last else self._ddp.no_sync():
            yield
        if last:
            for parameter in self._masters:
                parameter.grad = None  # the master's gradient already holds the average, not rounded

    def load_state(self, reader: StateReader) -> None:
        """See ``Strategy``; a backward pass then makes DDP arrange its buckets as from a process's second step on.

        DDP rearranges them after the first backward pass. The position of an element in its bucket decides in which
        order three or more ranks add it up. Without this, the first step of a resumed run would differ from that of an
        uninterrupted run in the last bit.
        """
        super().load_state(reader)
        if self._exact is not None:  # for which order does not matter
            return
        tokens = torch.zeros(self._batch_shape, dtype=torch.long, device=self._device)
        with self._micro_batch(last=True):
            torch.autograd.backward(self._training_loss(tokens, tokens))
        self._optimizer.zero_grad()

    def state_tensors(self) -> base.StateTensors:
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
    low, parameters = bucket.buffer(), bucket.parameters()
    flat = low.float()
    for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
        master = masters[parameter]
        gradient = part.view_as(master)
        if master.grad is not None:
            gradient += master.grad
        master.grad = gradient  # a view of ``flat``, which is reduced in place below
    flat /= dist.get_world_size()
    reduced: Future[Tensor] = dist.all_reduce(flat, async_op=True).get_future().then(lambda _: low)
    return reduced


class Fsdp(TorchStrategy):
    """Each rank holds one shard of all weights, gradients and optimizer state."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        model = sharded_model(config, device)
        self._shards = ShardedWeights(model)
        super().__init__(config, device, model=model, weights=self._shards)
        assert isinstance(model, FSDPModule)  # ``fully_shard`` gives a module this class too
        self._fully_sharded: FSDPModule = model
        self._shapes = parameter_shapes(config.model)
        recipe = config.recipe.dsgpt.fsdp
        self._reshard_after_forward, self._reduces_each = recipe.reshard_after_forward, recipe.accumulation == "sharded"

    def _micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Until the ``last`` micro batch, every rank sums whole gradients; then they are reduced to shards.

        Or, if the recipe says so, those of every micro batch are.

        Weights that stay gathered between forward and backward pass also stay gathered until the next micro batch:
        their memory is needed anyway, and they need not be gathered again. The root's weights always stay; those of the
        blocks stay if the recipe says so.
        """
        self._shards.complete = last
        self._fully_sharded.set_requires_gradient_sync(last or self._reduces_each)
        self._fully_sharded.set_reshard_after_backward(last or self._reshard_after_forward)
        self._fully_sharded.set_reshard_after_backward(last, recurse=False)
        return contextlib.nullcontext()

    def _global_norm(self, gradients: Iterable[Tensor]) -> Tensor:
        """The norm over all ranks. No two ranks hold the same element, so its square is the sum of their squares."""
        if self._exact is not None:
            return self._exact.norm(gradients, group=None, split=self._ranks > 1)
        return self._sum_over_ranks(base.square_sum(gradients).to(self._device)).sqrt().float()

    def watch(self, watch: base.Watch, undo: contextlib.ExitStack) -> None:
        """See ``Strategy``; a gathered parameter, whose gradient is whole, is found when its module first computes."""
        undo.enter_context(base.watch_losses(self.model, watch))
        left = dict(self._shapes)

        def find(prefix: str, module: nn.Module, _given: object) -> None:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if (shape := left.pop(name, None)) is not None:
                    hook = partial(watch.gradient, name, [Box.whole(shape)])
                    undo.enter_context(parameter.register_hook(hook))  # type: ignore[no-untyped-call]  # as above

        for prefix, module in self.model.named_modules():
            undo.enter_context(module.register_forward_pre_hook(partial(find, prefix)))

    def eval_step(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """See ``Strategy``."""
        sums = super().eval_step(batches)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # in training, the backward pass does it
        return sums

    def _boxes(self, name: str) -> list[Box]:
        shape = self._shapes[name]
        rows = _own_rows(torch.arange(shape[0]), self._rank, self._ranks).tolist()
        return [Box((rows[0], *(0 for _ in shape[1:])), (len(rows), *shape[1:]))] if rows else []

    def shards(self) -> Shards:
        """See ``Strategy``; no two ranks hold the same."""
        boxes = {name: self._boxes(name) for name in self._weights.parameters}
        return Shards(boxes, self._param_states()).only(lambda name: boxes[name] != [])

    def replicated_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy``: none, except on a single rank, whose shards are whole."""
        if self._ranks == 1:
            for name, parameter in self._weights.parameters.items():
                yield name, parameter.detach()

    def state_tensors(self) -> base.StateTensors:
        """See ``Strategy``; the optimizer changes the fp32 shards that are gathered."""
        state = super().state_tensors()
        return state._replace(parameters=state.master, master=[])


class ShardedWeights(MasterWeights):
    """The shards of a model under ``fully_shard`` as plain tensors, which share their memory.

    Optimizers take their fast path on plain tensors only, and no operation on plain tensors can hide a collective. A
    shard is empty where a parameter has fewer rows than there are ranks. The next forward pass gathers what changed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, torch.float32)
        self.complete = True
        """Whether the next gradients are those of a whole step."""
        with torch.no_grad():
            self.parameters = {name: nn.Parameter(_dtensor(low).to_local()) for name, low in self._low.items()}

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Move the shards of complete gradients to ``parameters``; until then FSDP adds to them in place."""
        for name, low in self._low.items() if self.complete else ():
            if low.grad is not None:
                self.parameters[name].grad = _dtensor(low.grad).to_local()
                low.grad = None


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
        model = base.model_of(config)
    if config.options.compile:
        base.compile_blocks(model)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if recipe.cpu_offload else OffloadPolicy()
    reduce_dtype = torch.float32 if recipe.reduce_dtype == "fp32" else low
    mesh = init_device_mesh(device.type, (config.topology.world_size,))
    precision = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce_dtype)
    shard = partial(fully_shard, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for block in model.blocks:
        shard(block, reshard_after_forward=recipe.reshard_after_forward)
    shard(model, reshard_after_forward=False)  # the backward pass first needs the weights that the forward used last

    values, home = base.initial_values(config), torch.device("cpu") if recipe.cpu_offload else device
    filled: dict[nn.Parameter, nn.Parameter] = {}
    shards = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):  # tied parameters stay tied
        if parameter not in filled:
            rows = _own_rows(values(name, parameter.shape), config.topology.rank, config.topology.world_size)
            # Master weights start rounded to the precision of the computation, as under every strategy.
            own = torch.empty_like(parameter, device=home)
            _dtensor(own).to_local().copy_(rows.to(low))
            filled[parameter] = nn.Parameter(own)
        shards[name] = filled[parameter]
    model.load_state_dict(shards, assign=True)
    return model


def _own_rows(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of ``whole`` that ``Shard(0)`` gives ``rank``: equal numbers of rows, the last ranks fewer or none."""
    rows = -(-whole.shape[0] // ranks)
    return whole[rank * rows : (rank + 1) * rows]
