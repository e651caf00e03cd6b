"""Formulas for DeepSpeed's strategies: the stages of ZeRO, whose model tensor, sequence or pipeline ranks may split.

``dsgpt.planner.pytorch_formulas`` has the contract, the letters of the formulas and the strategies of PyTorch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from dsgpt.planner.pytorch_formulas import (
    AFTER_STEP,
    BACKWARD,
    BEFORE_STEP,
    DURING_STEP,
    FORWARD,
    Copied,
    ModelState,
    Moment,
    Planned,
    Shares,
    Traffic,
    embedding_bytes,
)
from dsgpt.planner.setup import EMBEDDING, FULL, FlatGroup, ParameterSize, optimizer_groups, persistent, total

_AT_ONCE = 500_000_000
"""Elements that DeepSpeed's engine reduces per call where ZeRO does not reduce (``MEMORY_OPT_ALLREDUCE_SIZE``)."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """A bucket of ZeRO-2 or 3 when it is reduced."""

    elements: int
    blocks: int
    """Number of blocks that still have activations."""
    has_embedding: bool
    """Whether the bucket has the embedding's gradient; until it comes, the head's part of it waits outside."""


_LOSS_FIGURES = 3 * FULL
"""Bytes of a token that tensor ranks gather from each other for the loss."""


class DeepSpeed(Planned):
    """Formulas that all stages of ZeRO share."""

    operations_per_tensor = 8
    searches_extremes: ClassVar[bool] = False
    """Whether DeepSpeed searches for the least and the largest gradient."""

    @property
    def steps_on_host(self) -> bool:
        """True with ``offload_optimizer``, to host memory or to files."""
        return self.setup.recipe.offload_optimizer != "none"

    @property
    def gradient_width(self) -> int:
        """Bytes per gradient element when it is sent: w, but 4 with sequence parallelism."""
        return FULL if self.setup.sizes.sequence > 1 else self.setup.low

    # Memory.

    def bucket_bytes(self, width: int) -> int:
        """Bytes of the reduce buffer, which always has its full size; there are two with ``overlap_comm``."""
        if not self.setup.contiguous_gradients:
            return 0
        return width * self.setup.reduce_bucket_size * (2 if self.setup.recipe.zero_optimization.overlap_comm else 1)

    def bucket_fills(self, parameters: Sequence[ParameterSize]) -> Iterator[Fill]:
        """Yields the buckets of a backward pass; gradients come in the reverse order of the parameters.

        A gradient that is larger than a bucket is reduced by itself.
        """
        limit, elements, last = self.setup.reduce_bucket_size, 0, parameters[-1]
        for part in reversed(parameters):
            if elements and elements + part.numel > limit:
                blocks = int(part.name.split(".")[1]) + 1 if part.name.startswith("blocks.") else 0
                yield Fill(elements=elements, blocks=blocks, has_embedding=False)
                elements = 0
            elements += part.numel if part.numel <= limit else 0
            last = part
        yield Fill(elements=elements, blocks=0, has_embedding=last.name == EMBEDDING and last.numel <= limit)

    def embedding(self, rank: int) -> int:
        """Bytes of the embedding's gradient (wE); 0 on ranks without the embedding."""
        return embedding_bytes(self.setup) if any(part.name == EMBEDDING for part in self.setup.parameters(rank)) else 0

    def unfused(self, rank: int) -> int:
        """Bytes of two temporary numbers per weight of a group, where PyTorch's AdamW is not fused: in pipelines."""
        if self.setup.sizes.pipeline == 1 or self.setup.fused_adam or self.setup.recipe.optimizer.type != "AdamW":
            return 0
        return 2 * FULL * max(group.part for group in self.groups(rank))

    def groups(self, rank: int) -> list[FlatGroup]:
        """Flat buffers of the rank's parameters, of which a rank of ZeRO-1 or 2 owns a part."""
        of_stage = self.setup.group_sizes[self.setup.stage(rank)]
        return [FlatGroup(sizes=sizes, ranks=self.setup.zero_ranks) for sizes in of_stage]

    # Traffic.

    def traffic(self, rank: int) -> list[Traffic]:
        """Traffic between ranks that share a copy of the model, and between ranks that hold the same parameters."""
        return [*self._inside_a_copy(rank), *self.zero_traffic(rank)]

    def _inside_a_copy(self, rank: int) -> Iterator[Traffic]:
        """Traffic between tensor, sequence and pipeline ranks.

        Tensor ranks sum the residual stream twice per block in the forward pass, and twice in the backward pass. Each
        looks up its rows of the embedding, which are summed, and the gradient that leaves the head is a sum, too. For
        the loss each gathers three numbers of a token from the others. Recomputing a block repeats the forward pass
        without its last sum, which nothing in the block needs. Sequence ranks have per block one all-to-all each of
        queries, keys, values and the result, and the same for their gradients. A stage sends the residual stream to
        the next stage, and its gradient to the previous one. Each tensor rank sends its part. The receivers gather it,
        and the senders gather it before the backward pass. The first and the last stage sum the embedding's gradient,
        in fp32; the programs of others do so in the precision of what they accumulate.
        """
        setup, sizes, stage = self.setup, self.setup.sizes, self.setup.stage(rank)
        again, following, preceding = int(setup.activation_checkpointing), stage < sizes.pipeline - 1, stage > 0
        blocks, exchanges = setup.blocks(rank), (8 + 4 * again) * setup.model.n_layer
        sums = 2 * blocks + (stage == 0), (2 + again) * blocks + setup.computes_loss(rank)
        tensor = partial(self._streams, axis="tensor", ranks=sizes.tensor, calls=sum(sums))
        yield tensor("all_reduce", count=sum(sums), width=setup.low, passes=sums)
        if setup.computes_loss(rank):
            in_streams = _LOSS_FIGURES * sizes.tensor / (setup.low * setup.model.n_embd)
            yield tensor("all_gather", count=in_streams, calls=1, passes=(1, 0))
        sequence = partial(self._streams, axis="sequence", ranks=sizes.sequence, calls=exchanges)
        yield sequence("all_to_all", count=exchanges, passes=(1, 1 + again))
        pipeline = partial(self._streams, axis="pipeline", ranks=2, calls=2)
        yield pipeline("send", count=(following + preceding) / sizes.tensor, passes=(following, preceding))
        yield tensor("all_gather", count=2 * following + preceding, passes=(preceding, 2 * following))
        if self.embedding(rank):
            width = setup.low if setup.accumulation == "sharded" and not setup.uses_bf16_optimizer else FULL
            yield Traffic(
                what="gradients",
                operation="all_reduce",
                group_size=sum(bool(self.embedding(each)) for each in setup.first_ranks),
                payload_bytes=width * setup.embedding_elements,
                summed_width=width,
                axis="pipeline",
                calls=1,
                once={(BEFORE_STEP, None): 1},
            )

    def _streams(
        self, operation: str, *, axis: str, ranks: int, count: float, calls: int, passes: Shares, width: int = FULL
    ) -> Traffic:
        """Traffic of ``count`` residual streams (B, T, C), wBTC bytes each, in ``calls`` calls per micro batch."""
        setup, micro_batches = self.setup, self.setup.gradient_accumulation_steps
        return Traffic(
            what="activations",
            operation=operation,
            group_size=ranks,
            payload_bytes=round(count * setup.low * setup.tokens * setup.model.n_embd * micro_batches),
            summed_width=width,
            axis=axis,
            calls=calls * micro_batches,
            passes=passes,
        )

    def zero_traffic(self, rank: int) -> list[Traffic]:
        """Traffic between the ranks that hold the same parameters.

        ZeRO-0 and 1 send gradients once per step, wP, and ZeRO-2 in every micro batch. Stages 1 and 2 then send
        weights, wP. They all-reduce gradients, unless each piece of a bucket is reduced to the rank that steps on it.
        """
        return [self.reduced("all_reduce", self.elements(rank))]

    def reduced(self, operation: str, elements: int) -> Traffic:
        """Traffic of the gradients of ``elements``, for all reductions of a step.

        The number of calls follows from the recipe's bucket size. If they are reduced once per step, that is before
        the step; ZeRO-1 with ``overlap_comm`` does so in the last backward pass.
        """
        zero, width = self.setup.recipe.zero_optimization, self.gradient_width
        size = self.reductions * width * elements
        at_end = zero.stage == 1 and zero.overlap_comm and not self.setup.uses_bf16_optimizer
        place = self.last_backward if at_end else (BEFORE_STEP, None)
        return Traffic(
            what="gradients",
            operation=operation,
            group_size=self.setup.zero_ranks,
            payload_bytes=size,
            summed_width=width,
            calls=self.reductions + math.ceil(size / (width * zero.reduce_bucket_size)),
            passes=(0, int(self.reduces_each_micro_batch)),
            once={} if self.reduces_each_micro_batch else {place: 1},
            **self.overlap,
        )

    @property
    def overlap(self) -> dict[str, Any]:
        """Arguments ``behind`` and ``hidden`` of ``Traffic``; empty without ``overlap_comm``.

        All pieces but the embedding's hide behind the backward passes that reduce gradients, at stage 3 behind half of
        the computation.
        """
        zero, layers, count = self.setup.recipe.zero_optimization, self.setup.model.n_layer, self.reductions
        if not zero.overlap_comm or not zero.stage:
            return {}
        return {"behind": (count / 2, count / 2) if zero.stage == 3 else (0, count), "hidden": layers / (layers + 1)}

    # Copies to the host.

    def copied(self, rank: int) -> Iterator[Copied]:
        """Copies of gradients to the host, of new weights back, of moments and master weights from files and back."""
        if not self.steps_on_host:
            return
        setup, own = self.setup, self.stepped_elements(rank)
        gradients = partial(Copied, what="gradients", link="host")
        for number, out, back in self.summed_in_host(rank):
            yield gradients(moment=BACKWARD, micro_batch=number, to_device=True, size=back)
            yield gradients(moment=BACKWARD, micro_batch=number, to_device=False, size=out)
        moment, micro_batch = self.last_backward if setup.recipe.zero_stage > 1 else (BEFORE_STEP, None)
        yield gradients(moment=moment, micro_batch=micro_batch, to_device=False, size=FULL * own)
        if setup.recipe.offload_optimizer == "nvme":
            state = partial(Copied, moment=DURING_STEP, micro_batch=None, what="optimizer state", link="files")
            yield from (state(to_device=comes, size=FULL * (1 + setup.moments) * own) for comes in (True, False))
        if setup.recipe.offload_param == "none":  # else they stay in the host until they are gathered
            size = setup.low * own
            yield Copied(moment=AFTER_STEP, micro_batch=None, what="weights", link="host", to_device=True, size=size)

    def summed_in_host(self, rank: int) -> Iterator[tuple[int, int, int]]:  # noqa: ARG002 - of all stages
        """Yields for each micro batch that accumulates in the host: its number, bytes to the host, bytes back."""
        yield from ()

    # Time.

    @property
    def overlap_in_words(self) -> str:
        """Sentence for the plan: which communication overlaps with computation on GPUs."""
        zero = self.setup.recipe.zero_optimization
        if not zero.overlap_comm or not zero.stage:
            return "nothing overlaps"
        if zero.stage == 3:
            return "weights and gradients overlap with computation (overlap_comm)"
        return "gradients overlap with the backward pass (overlap_comm); weights do not"

    def divided(self) -> int:
        """Bytes per element to divide gradients by the number of ranks, 2w per reduction."""
        reducing = self.setup.world_size if self.setup.uses_bf16_optimizer else self.setup.zero_ranks
        if reducing == 1 and self.setup.recipe.zero_stage == 1:
            return 0
        return 2 * self.gradient_width * self.reductions

    def divided_in_fp32(self) -> int:
        """``divided()`` if gradients are divided in fp32, otherwise 0."""
        return self.divided() if self.gradient_width == FULL else 0

    def low_arithmetic_bytes(self, rank: int) -> int:
        """Bytes of 16-bit arithmetic: dividing gradients by the ranks, and the search for extremes, 2w."""
        low = self.gradient_width != FULL
        return self.elements(rank) * (self.divided() + 2 * self.setup.low * self.searches_extremes) if low else 0


class Zero0(DeepSpeed):
    """Every rank has the whole model state of its part of the model."""

    searches_extremes = True

    def model_state(self, rank: int) -> ModelState:
        """The same as DDP in fp32. In bf16 and fp16 DeepSpeed has gradients in both precisions: wP + 4P."""
        state = super().model_state(rank)
        return state if self.setup.low == FULL else replace(state, gradients=state.gradients + state.parameters)

    def start_bytes(self, rank: int, device: str) -> int:  # noqa: ARG002 - of all strategies
        """Gradients and moments in bf16 and fp16, where DeepSpeed first steps on gradients of zero; 0 in fp32."""
        state = self.model_state(rank)
        return state.gradients + state.optimizer if self.setup.low != FULL else 0

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Gradients wP and a flat copy of them to reduce; in bf16 and fp16 also an fp32 copy, 4P.

        In bf16 and fp16 this package accumulates micro batches in fp32. On a CPU it casts each gradient first.
        """
        setup, elements, embedding = self.setup, self.elements(rank), self.embedding(rank)
        several, separate = setup.gradient_accumulation_steps > 1, setup.low != FULL
        new, flat = setup.low * elements, setup.low * min(_AT_ONCE, elements)
        width = setup.low if setup.accumulation == "sharded" else FULL
        earlier = width * elements if several else 0
        largest = max(part.numel for part in setup.parameters(rank))
        cast = FULL * largest if several and separate and device == "cpu" else 0
        end = 2 * embedding if several and not separate else new + embedding
        return [
            *self.before_reduction(rank, {"gradients": earlier}),
            Moment(name="reduction", parts={"gradients": earlier, "new_gradients": end}),
            Moment(name="step", parts={"gradients": earlier, "new_gradients": new, "other": cast}),
            Moment(name="step", parts={"gradients": new, "buckets": flat}),
            Moment(name="step", parts={"gradients": self.model_state(rank).gradients, "other": self.unfused(rank)}),
            Moment(name="evaluation", parts={}),
        ]

    def copied_around_reductions(self) -> float:
        """Bytes per element: 4w for a flat copy and back; in fp32 also the division by the ranks.

        In low precision the sum of several micro batches is rounded, w + 4, and every gradient is copied to fp32,
        w + 4.
        """
        low = self.setup.low
        rounded = low + FULL if self.setup.gradient_accumulation_steps > 1 else 0
        return 4 * low + self.divided_in_fp32() + (0 if self.setup.precision == "fp32" else rounded + low + FULL)


class Flat(DeepSpeed):
    """ZeRO-1 and 2: one flat buffer per group of the optimizer, of which every rank owns a part."""

    copies_to_buckets = True

    @property
    def distinct_ranks(self) -> range:
        """Every rank but tensor peers in fp32, where ranks hold unequal numbers of whole gradients."""
        setup = self.setup
        return range(0, setup.world_size, setup.sizes.tensor) if setup.precision == "fp32" else setup.first_ranks

    def part(self, rank: int) -> int:
        """The index of ``rank`` among the ranks that share the same parameters; tensor peers are innermost."""
        return rank // self.setup.sizes.tensor % self.setup.zero_ranks

    def touched(self, rank: int) -> int:
        """Elements of all parameters that overlap the rank's parts, each counted whole."""
        return sum(group.touched(self.part(rank)) for group in self.groups(rank))

    def stepped_elements(self, rank: int) -> int:
        """Number of elements of the rank's parts."""
        return sum(group.part for group in self.groups(rank))

    def padded_elements(self, rank: int) -> int:
        """Number of elements of the parts of all ranks, padding included."""
        return sum(group.padded for group in self.groups(rank))

    def model_state(self, rank: int) -> ModelState:
        """Parameters wP, moments 4mP/N, master weights 4P/N unless in fp32.

        With offload there are master weights in fp32 runs, too (``step_on_weights``). In bf16 and fp16 only the copy of
        the gradients that the host steps on is in the host.
        """
        setup, groups, own = self.setup, self.groups(rank), self.stepped_elements(rank)
        mixed = setup.precision != "fp32"
        gradients = self.offloaded_gradients(rank) if self.steps_on_host else self.own_gradients(rank)
        master, optimizer = FULL * own, self.optimizer_state(own, tensors=len(groups))
        moved = {"gradients": FULL * own if mixed else gradients, "optimizer": optimizer, "master": master}
        return ModelState(
            parameters=setup.low * self.padded_elements(rank),
            gradients=gradients,
            optimizer=optimizer,
            master=master if mixed or self.steps_on_host else 0,
            off_device=moved if self.steps_on_host else {},
        )

    def own_gradients(self, rank: int) -> int:
        """Bytes of gradients without offload: 4P/N in bf16 and fp16, about twice that in fp32.

        In bf16 and fp16 the reduced gradients are one flat fp32 buffer. In fp32 there are the reduced gradients and the
        flat copy that the optimizer steps on. The former are whole parameters; one on the border of two ranks counts on
        both. The optimizer steps on one group after the other, with a flat copy of that group alone. A part within a
        single parameter needs no copy. Without ``contiguous_gradients`` a group's gradients are freed before its step.
        """
        groups, part = self.groups(rank), self.part(rank)
        if self.setup.precision != "fp32":
            return FULL * self.stepped_elements(rank)
        if self.setup.contiguous_gradients:
            return self._with_flat_copy(rank)
        most = waiting = 0  # while a group steps, the gradients of the groups after it wait
        for group in reversed(groups):
            most = max(most, waiting + (group.touched(part) if group.is_one_piece(part) else group.part))
            waiting += group.touched(part)
        return FULL * most

    def _with_flat_copy(self, rank: int) -> int:
        """Bytes of gradients and of the flat copy of the largest group, in fp32, before the group's own are freed."""
        copies = (0 if group.is_one_piece(self.part(rank)) else group.part for group in self.groups(rank))
        return FULL * (self.touched(rank) + max(copies))

    def offloaded_gradients(self, rank: int) -> int:
        """Bytes of gradients in the host and on the device."""
        raise NotImplementedError

    def start_bytes(self, rank: int, device: str) -> int:
        """Bytes of the cloned part of the weights that is cast to fp32, or of what exists later, if that is more.

        Later, if nothing is offloaded, gradients of zero, in fp32 beside the clone; with offload, buffers for the
        largest parameter. The weights are made flat in one more copy, on a GPU only if it has room for that
        (``flatten_on_accelerator`` of ``DeepSpeedZeroOptimizer``), but always by ``BF16_Optimizer``.
        """
        setup, groups = self.setup, self.groups(rank)
        other = setup.low * max(group.part for group in groups)
        if self.steps_on_host:
            other = max(other, setup.low * max(part.numel for part in setup.parameters(rank)))
        elif setup.precision == "fp32":
            other += FULL * self.stepped_elements(rank)
        else:
            other = max(other, FULL * self.stepped_elements(rank))
        if device == "cpu" or setup.uses_bf16_optimizer:
            other = max(other, setup.low * max(group.padded for group in groups))
        return other

    def stepped_gradients(self, rank: int, device: str) -> tuple[int, int]:
        """Bytes of gradients in the step, and of those that stay after it because the host has the same memory."""
        state = self.model_state(rank)
        away = state.off_device.get("gradients", 0)  # in the host, which keeps the memory
        return (state.gradients, away) if device == "cpu" else (state.gradients - away, 0)

    def with_offload_buffers(self, moments: list[Moment], rank: int, device: str) -> list[Moment]:
        """``moments``, with offload plus buffers for the largest parameter, and on a CPU for the new weights."""
        if not self.steps_on_host:
            return moments
        other = self.setup.low * max(part.numel for part in self.setup.parameters(rank))
        if device == "cpu":
            other = 2 * other + self.setup.low * self.stepped_elements(rank)
        return [replace(each, parts={**each.parts, "other": each.parts.get("other", 0) + other}) for each in moments]

    def zero_traffic(self, rank: int) -> list[Traffic]:
        """The reduction of gradients, and the all-gather of the new weights.

        With the recipe's ``reduce_scatter`` each piece of a bucket is reduced to the one rank that steps on it.
        ``BF16_Optimizer`` never does it.
        """
        zero = self.setup.recipe.zero_optimization
        to_owner = zero.reduce_scatter and zero.contiguous_gradients and not zero.use_multi_rank_bucket_allreduce
        operation = "reduce" if to_owner and not self.setup.uses_bf16_optimizer else "all_reduce"
        weights = Traffic(
            what="weights",
            operation="all_gather",
            group_size=self.setup.zero_ranks,
            payload_bytes=self.setup.low * self.padded_elements(rank),
            calls=2,
            once={(AFTER_STEP, None): 1},
        )
        return [self.reduced(operation, self.elements(rank)), weights]


class Zero1(Flat):
    """ZeRO-1 in fp32 and fp16, and with offload in bf16."""

    def offloaded_gradients(self, rank: int) -> int:
        """Bytes 4P/N in host memory, and in bf16 and fp16 the whole gradients on the device, 4P.

        The whole gradients are accumulated on the device. In fp32 they are freed before the step. In bf16 and fp16
        nearly all of them, except those of the last buckets, are freed only after it.
        """
        whole = self.padded_elements(rank) if self.setup.precision != "fp32" else 0
        return FULL * (self.stepped_elements(rank) + whole)

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Gradients of several micro batches: 4P, in fp32 in every precision. At the end they go through the bucket."""
        setup, elements, embedding = self.setup, self.elements(rank), self.embedding(rank)
        several, bucket = setup.gradient_accumulation_steps > 1, self.bucket_bytes(FULL)
        width = setup.low if setup.accumulation == "sharded" else FULL
        earlier = {"gradients": width * elements if several else 0, "buckets": bucket if several else 0}
        end = 2 * embedding if several else setup.low * elements + embedding
        stepped, away = self.stepped_gradients(rank, device)
        flattened = stepped
        if setup.precision == "fp32" and not self.steps_on_host:
            flattened = max(stepped, self._with_flat_copy(rank))
        moments = [
            *self.before_reduction(rank, earlier, bucket=bucket),
            Moment(name="reduction", parts=earlier | {"new_gradients": end, "buckets": bucket}),
            Moment(name="step", parts={"gradients": flattened}),
            Moment(name="step", parts={"gradients": stepped, "other": self.unfused(rank)}),
            Moment(name="evaluation", parts={"gradients": away}),
        ]
        return self.with_offload_buffers(moments, rank, device)

    def copied_around_reductions(self) -> float:
        """Bytes per element: 4w to the bucket and back, unless a rank is alone; 8/n to make the fp32 part flat."""
        ranks = self.setup.zero_ranks
        return (4 * self.setup.low if ranks > 1 else 0) + self.divided_in_fp32() + 2 * FULL / ranks


class Bf16Optimizer(Flat):
    """ZeRO-1 in bf16 without offload: DeepSpeed's ``BF16_Optimizer``."""

    def own_gradients(self, rank: int) -> int:
        """Bytes of gradients in bf16 and fp32, 2P + 4P.

        With ``immediate_grad_update`` each bf16 gradient is freed as soon as it is added to the fp32 one.
        """
        low = 0 if self._frees_gradients else self.setup.low * self.elements(rank)
        return low + FULL * self.padded_elements(rank)

    def start_bytes(self, rank: int, device: str) -> int:
        """Bytes of the base class, or of the fp32 sums of all gradients."""
        return max(super().start_bytes(rank, device), FULL * self.padded_elements(rank))

    @property
    def _frees_gradients(self) -> bool:
        bf16 = self.setup.recipe.bf16
        return bf16 is not None and bf16.immediate_grad_update

    def moments(self, rank: int, device: str) -> list[Moment]:  # noqa: ARG002 - of all strategies
        """Permanent fp32 sums of all gradients, 4P, and the fp32 and bf16 copies from which they are reduced.

        Sequence ranks reduce them in fp32, which needs no copy in bf16.
        """
        setup, elements = self.setup, self.elements(rank)
        several, embedding = setup.gradient_accumulation_steps > 1, self.embedding(rank)
        sums = FULL * self.padded_elements(rank)
        new = embedding if self._frees_gradients else setup.low * elements
        flat = min(_AT_ONCE, elements) if setup.world_size > 1 else 0
        width = FULL + (setup.low if setup.sizes.sequence == 1 else 0)
        end = new + (2 if several else 1) * embedding
        stepped = {"gradients": sums, "new_gradients": new}
        return [
            *self.before_reduction(rank, {"gradients": sums, "new_gradients": new if several else 0}),
            Moment(name="reduction", parts={"gradients": sums, "new_gradients": end}),
            Moment(name="step", parts=stepped | {"buckets": width * flat}),
            Moment(name="step", parts=stepped | {"other": self.unfused(rank)}),
            Moment(name="evaluation", parts={"gradients": sums}),
        ]

    def copied_around_reductions(self) -> float:
        """Bytes per element: 16 for a flat copy of the fp32 sums and back, 2w + 8 for the cast to bf16 and back.

        Sequence ranks stay in fp32. With several micro batches the gradients in bf16 stay: each is set to zero, w, and
        later ones are added to it, 3w.
        """
        micro_batches, low = self.setup.gradient_accumulation_steps, self.setup.low
        copied = low * micro_batches + 3 * low * (micro_batches - 1) if micro_batches > 1 else 0
        if self.setup.world_size > 1:
            copied += 4 * FULL + (2 * low + 2 * FULL if self.gradient_width == low else 0)
        return copied + self.divided_in_fp32()


class Zero2(Flat):
    """ZeRO-2: a full bucket is reduced at once, into the sums of this rank's part."""

    reduces_each_micro_batch = True

    def offloaded_gradients(self, rank: int) -> int:
        """Bytes 4P/N in host memory, and the sum of micro batches: 4P/N, in fp32 of whole parameters.

        In bf16 and fp16 that sum is a flat buffer of the rank's part on the device
        (``_get_compact_grad_partition_buffer`` of ``DeepSpeedZeroOptimizer``); in fp32 it is in the host.
        """
        own = self.stepped_elements(rank)
        if self.setup.precision != "fp32":
            return FULL * 2 * own
        return FULL * (own + (self.touched(rank) if self.reductions > 1 else 0))

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Buckets, which are reduced from a flat copy, and reduced gradients.

        Reduced gradients are those of all parameters that overlap the rank's part, in an fp32 run, and the part alone,
        in fp32, in bf16 and fp16 runs. With offload the host always has memory for a copy of them, on a CPU in the same
        memory. The sums are as large as in the step.
        """
        setup, embedding = self.setup, self.embedding(rank)
        stepped, away = self.stepped_gradients(rank, device)
        own = self.stepped_elements(rank)
        first, later = 0, FULL * (own if setup.precision != "fp32" else self.touched(rank))
        if self.steps_on_host:
            first, later = FULL * own if device == "cpu" else 0, stepped
        several, bucket = setup.gradient_accumulation_steps > 1, self.bucket_bytes(setup.low)
        moments = self.before_reduction(rank, {"gradients": later if several else first}, bucket=bucket)
        for number, fill in enumerate(self.bucket_fills(setup.parameters(rank))):
            now = {
                "gradients": later if several or number or setup.low != FULL else first,
                "new_gradients": 0 if fill.has_embedding else embedding,
                "buckets": bucket + setup.low * fill.elements,
            }
            moments.append(Moment(name="reduction", blocks=fill.blocks, parts=now))
        moments.append(Moment(name="step", parts={"gradients": stepped}))
        moments.append(Moment(name="evaluation", parts={"gradients": away}))
        return self.with_offload_buffers(moments, rank, device)

    def summed_in_host(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yields copies in fp32: of whole parameters that overlap the part (``async_accumulate_grad_in_cpu_via_gpu``).

        In bf16 and fp16 it adds up on the device.
        """
        if self.setup.precision == "fp32" and self.reductions > 1:
            whole = FULL * self.touched(rank)
            for number in range(self.reductions):
                yield number, whole, whole if number else 0

    def copied_around_reductions(self) -> float:
        """Bytes per element: 4w to the bucket and to a flat copy; (w + 8)/n to add the rank's part to its sum."""
        low = self.setup.low
        return self.reductions * (4 * low + (low + 2 * FULL) / self.setup.zero_ranks) + self.divided_in_fp32()


_OPERATIONS_PER_PASS = 100
"""Operations for each parameter in each pass over the blocks: hooks look up, gather, wait for and release parameters in
Python. On a CPU nothing else runs."""


class Zero3(DeepSpeed):
    """ZeRO-3: every rank has a piece of each parameter; weights are gathered for each layer."""

    reduces_each_micro_batch = copies_to_buckets = True

    def sub_groups(self, rank: int) -> list[int]:
        """Elements of each group of the rank's pieces that the optimizer steps on at a time.

        A sub-group ends as soon as it has ``sub_group_size`` elements.
        """
        limit, sizes = self.setup.recipe.zero_optimization.sub_group_size, list[int]()
        for group in optimizer_groups(self.setup.parameters(rank)):
            elements = 0
            for part in group:
                elements += self.pieces([part])
                if elements >= limit:
                    sizes.append(elements)
                    elements = 0
            if elements:
                sizes.append(elements)
        return sizes

    def pieces(self, parameters: Iterable[ParameterSize]) -> int:
        """Elements of a rank's pieces of ``parameters``: each is flat, in equal pieces, the last one padded."""
        ranks = self.setup.zero_ranks
        return sum(-(-part.numel // ranks) for part in parameters)

    def persistent(self, rank: int) -> list[ParameterSize]:
        """Parameters that every rank holds whole, besides its pieces."""
        return persistent(self.setup.recipe.zero_optimization, self.setup.parameters(rank))

    def stepped_elements(self, rank: int) -> int:
        """Number of elements of the rank's pieces."""
        return self.pieces(self.setup.parameters(rank))

    def model_state(self, rank: int) -> ModelState:
        """Parameters wP/N, gradients up to 8P/N, moments 4mP/N, master weights 4P/N.

        Parameters that persist are also held whole, on the device even with offload (``_post_step`` of DeepSpeed's
        stage 3 gathers them). There are two copies of the gradients. The second is for the optimizer: of one sub-group
        at a time, with offload of all. With offload to NVMe, tensors that are large enough to be swapped are in files,
        which no measurement of memory includes.
        """
        setup, ranks = self.setup, self.setup.zero_ranks
        own, sub_groups = self.stepped_elements(rank), self.sub_groups(rank)
        whole = ranks * self.pieces(self.persistent(rank)) if ranks > 1 else 0  # one rank's pieces are the parameters
        sizes = {"parameters": setup.low * (own + whole), "master": FULL * own}
        sizes["gradients"] = FULL * (own + (own if self.steps_on_host else max(sub_groups)))
        sizes["optimizer"] = self.optimizer_state(own, tensors=len(sub_groups))
        stays = set() if self.steps_on_host else {"gradients", "optimizer", "master"}
        stays |= {"parameters"} if setup.recipe.offload_param == "none" else set()
        away = sizes | {"parameters": setup.low * own}
        return ModelState(**sizes, off_device={name: size for name, size in away.items() if name not in stays})

    def start_bytes(self, rank: int, device: str) -> int:  # noqa: ARG002 - of all strategies
        """Bytes of the whole embedding in fp32 and in the run's precision (``zero.Init``)."""
        return (FULL + self.setup.low) * self.setup.model.largest_parameter()

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Gathered weights, the flat buffer of the rank's gradients, and the bucket; in the step gradients twice.

        Weights that are gathered together stay in the buffer of their all-gather until the last of them has been used.
        So they exist twice during the forward pass, and the embedding once more if it has been freed. On a CPU gloo
        copies the weights that are being gathered, so these exist twice as well. A full bucket is reduced from a copy
        in the order of the ranks, and gloo makes one more.
        """
        setup, layers, embedding = self.setup, self.setup.model.n_layer, embedding_bytes(self.setup)
        own, most = self.stepped_elements(rank), self.setup.gathers.most_live
        sums, stepped = FULL * own, FULL * (own + max(self.sub_groups(rank)))
        if self.steps_on_host:  # both copies exist in the host all the time
            sums = stepped = 2 * sums if device == "cpu" else 0
        base = {"gradients": sums, "buckets": self.bucket_bytes(setup.low)}
        if setup.zero_ranks == 1 and device != "cpu" and setup.recipe.offload_param != "none":
            base["weights"] = setup.low * total(self.persistent(rank))  # copies of pieces that are in the host
        whole = setup.low * most
        together = setup.low * min(setup.recipe.zero_optimization.stage3_prefetch_bucket_size, most)
        freed = embedding if [part.name for part in self.setup.gathers.all].count(EMBEDDING) > 1 else 0
        buffers = freed + (whole if device == "cpu" else together)
        moments = [
            Moment(name="forward", blocks=layers, parts=base | {"gathered": whole + buffers}),
            Moment(name="loss", blocks=layers, parts=base | {"gathered": whole}),
            Moment(name="backward", blocks=layers, parts=base | {"gathered": whole, "new_gradients": embedding}),
            Moment(name="step", parts=base | {"gradients": stepped}),
            Moment(name="evaluation", parts=base | {"gathered": whole}),
        ]
        for fill in self.bucket_fills(setup.parameters(rank)):
            buckets = base["buckets"] + (2 if device == "cpu" else 1) * setup.low * fill.elements
            waits = 0 if fill.has_embedding else embedding
            parts = {"buckets": buckets, "new_gradients": waits, "gathered": min(whole, embedding)}
            moments.append(Moment(name="reduction", blocks=fill.blocks, parts=base | parts))
        return moments

    def zero_traffic(self, rank: int) -> list[Traffic]:
        """Gathers of weights for both passes and reductions of gradients in every micro batch; persistent weights once.

        About a x (2wP + wP) + w x persistent elements. Each piece of a gradient is reduced to its rank, or
        a bucket is all-reduced.
        """
        setup, zero = self.setup, self.setup.recipe.zero_optimization
        limit = setup.reduce_bucket_size if zero.contiguous_gradients and not zero.reduce_scatter else 0
        alone = [part for part in setup.parameters(rank) if part.numel > limit]
        bucketed = total(part for part in setup.parameters(rank) if part.numel <= limit)
        reduced = {"reduce_scatter": setup.zero_ranks * self.pieces(alone), "all_reduce": bucketed}
        return [*self.gathers(rank), *(self.reduced(operation, count) for operation, count in reduced.items())]

    def gathers(self, rank: int) -> list[Traffic]:
        """All-gathers of weights, with weight and bias of a layer per call; persistent parameters after the step."""
        setup, ranks, passes = self.setup, self.setup.zero_ranks, self._pieces_of_passes()
        persistent = self.pieces(self.persistent(rank))
        return [
            Traffic(
                what="weights",
                operation="all_gather",
                group_size=ranks,
                payload_bytes=setup.low * ranks * (self.reductions * sum(passes) + persistent),
                calls=self.reductions * len(self.setup.gathers.all) // 2 + 1,
                passes=passes,
                once={(AFTER_STEP, None): persistent},
                **self.overlap,
            )
        ]

    def _pieces_of_passes(self) -> tuple[int, int]:
        """Elements of a rank's pieces that the forward pass gathers, and that the backward pass gathers."""
        forward = self.pieces(self.setup.gathers.forward)
        return forward, self.pieces(self.setup.gathers.all) - forward

    def copied(self, rank: int) -> Iterator[Copied]:
        """Copies of the base class, and of the rank's pieces of weights before every gather."""
        yield from super().copied(rank)
        links = {"none": (), "cpu": ("host",), "nvme": ("files", "host")}[self.setup.recipe.offload_param]
        pieces = dict(zip((FORWARD, BACKWARD), self._pieces_of_passes(), strict=True))
        for number in range(self.reductions):
            for moment, elements in pieces.items():
                weights = partial(Copied, moment=moment, micro_batch=number, what="weights", to_device=True)
                yield from (weights(link=link, size=self.setup.low * elements) for link in links)

    def summed_in_host(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """The fp32 sums of the rank's part, copied to the device and back.

        Even the first one, which only replaces the sum, comes back (``partition_grads``).
        """
        whole = FULL * self.stepped_elements(rank)
        yield from ((number, whole, whole) for number in range(self.reductions))

    @property
    def hook_operations(self) -> int:
        """Number of Python operations of its hooks per micro batch."""
        return _OPERATIONS_PER_PASS * (3 if self.setup.activation_checkpointing else 2) * len(self.setup.parameters(0))

    def copied_around_reductions(self) -> float:
        """Bytes per element: 2w to the bucket; (w + 8)/n to add the rank's part to its sum."""
        low = self.setup.low
        return self.reductions * (2 * low + (low + 2 * FULL) / self.setup.zero_ranks) + self.divided_in_fp32()
