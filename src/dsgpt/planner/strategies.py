"""The formulas of DeepSpeed's strategies, the choice of a setup's, and what its ranks hold, send and copy.

At all stages of ZeRO the model may be split: among tensor, sequence and pipeline ranks. The passes of a step are in
order, and traffic and copies stand at their places. A pipeline runs its micro batches as DeepSpeed's ``TrainSchedule``
does: one forward pass, then one backward pass in turn (1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from dsgpt.planner.setup import (
    EMBEDDING,
    FULL,
    FlatGroup,
    Gathers,
    ParameterSize,
    Setup,
    gathers_of,
    optimizer_groups,
    persistent,
    total,
)
from dsgpt.planner.strategy import (
    AFTER_STEP,
    BACKWARD,
    BEFORE_STEP,
    DURING_STEP,
    FORWARD,
    Baseline,
    Copied,
    Ddp,
    Fsdp,
    ModelState,
    Moment,
    Place,
    Planned,
    Shares,
    Traffic,
    embedding_bytes,
)

_AT_ONCE = 500_000_000
"""Elements that DeepSpeed's engine reduces at a time where no stage of ZeRO does it (``MEMORY_OPT_ALLREDUCE_SIZE``)."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """A bucket of ZeRO-2 or 3 when it is reduced."""

    elements: int
    blocks: int
    """How many blocks still have activations then."""
    has_embedding: bool
    """Whether the bucket has the embedding's gradient; until it comes, the head's part of it waits outside."""


class DeepSpeed(Planned):
    """What all stages of ZeRO have in common."""

    operations_per_tensor = 8
    searches_extremes: ClassVar[bool] = False
    """Whether it looks for the least and the largest gradient."""

    @property
    def steps_on_host(self) -> bool:
        """With offload of the optimizer to the host, or to its files."""
        return self.setup.recipe.offload_optimizer != "none"

    @property
    def gathers_to_save(self) -> bool:
        """Unless a rank has everything."""
        sizes = self.setup.sizes
        return self.setup.recipe.zero_stage > 0 or sizes.tensor > 1 or sizes.pipeline > 1

    @property
    def gradient_width(self) -> int:
        """Bytes per gradient: sent in the precision of the activations, but with sequence ranks in fp32."""
        return FULL if self.setup.sizes.sequence > 1 else self.setup.low

    # Memory.

    def bucket_bytes(self, width: int) -> int:
        """The buffer for gradients to reduce, which has its full size all the time; two that overlap."""
        if not self.setup.contiguous_gradients:
            return 0
        return width * self.setup.reduce_bucket_size * (2 if self.setup.recipe.zero_optimization.overlap_comm else 1)

    def bucket_fills(self, parameters: Sequence[ParameterSize]) -> Iterator[Fill]:
        """The buckets of a backward pass. Gradients come in the reverse order of the parameters.

        One that is larger than a bucket is reduced by itself.
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
        """WE on ranks that have the embedding."""
        return embedding_bytes(self.setup) if any(part.name == EMBEDDING for part in self.setup.parameters(rank)) else 0

    def before_reduction(self, rank: int, earlier: dict[str, int], *, bucket: int = 0) -> list[Moment]:
        """The loss and the beginning of the backward pass, with what earlier micro batches left.

        The bucket is allocated when the first gradient comes.
        """
        blocks = self.setup.blocks(rank)
        head = embedding_bytes(self.setup) if self.setup.computes_loss(rank) else 0
        gradients, buckets = earlier.get("new_gradients", 0) + head, max(bucket, earlier.get("buckets", 0))
        return [
            Moment(name="loss", blocks=blocks, parts=earlier),
            Moment(name="backward", blocks=blocks, parts=earlier | {"new_gradients": gradients, "buckets": buckets}),
        ]

    def unfused(self, rank: int) -> int:
        """Two numbers per weight of a group while PyTorch's AdamW steps in several operations, as in pipelines."""
        if self.setup.sizes.pipeline == 1 or self.setup.recipe.optimizer.type != "AdamW":
            return 0
        return 2 * FULL * max(group.part for group in self.groups(rank))

    def groups(self, rank: int) -> list[FlatGroup]:
        """The flat buffers of its parameters, of which a rank of ZeRO-1 or 2 has a part."""
        return [FlatGroup(sizes=sizes, ranks=self.setup.zero_ranks) for sizes in self.setup.group_sizes(rank)]

    # Traffic.

    def traffic(self, rank: int) -> list[Traffic]:
        """Between ranks that share a copy of the model, and between those that hold the same parameters."""
        return [*self._inside_a_copy(rank), *self.zero_traffic(rank)]

    def _inside_a_copy(self, rank: int) -> Iterator[Traffic]:
        """Between tensor, sequence and pipeline ranks.

        Tensor ranks sum the residual stream twice per block in the forward pass, and twice in the backward pass.
        Recomputing a block repeats the forward pass without its last sum, which nothing in the block needs. Sequence
        ranks have per block one all-to-all each of queries, keys, values and the result, and the same for their
        gradients. A stage sends the residual stream to the next one, and its gradient to the previous one: each tensor
        peer its part. The peers gather what they receive, and before the backward pass what they sent. The first and
        the last stage sum the embedding's gradient, in fp32.
        """
        setup, sizes, stage = self.setup, self.setup.sizes, self.setup.stage(rank)
        again, following, preceding = int(setup.activation_checkpointing), stage < sizes.pipeline - 1, stage > 0
        sums, exchanges = (4 + again) * setup.blocks(rank), (8 + 4 * again) * setup.model.n_layer
        tensor = partial(self._streams, axis="tensor", ranks=sizes.tensor, calls=sums)
        yield tensor("all_reduce", count=sums, width=setup.low, passes=(2, 2 + again))
        sequence = partial(self._streams, axis="sequence", ranks=sizes.sequence, calls=exchanges)
        yield sequence("all_to_all", count=exchanges, passes=(1, 1 + again))
        pipeline = partial(self._streams, axis="pipeline", ranks=2, calls=2)
        yield pipeline("send", count=(following + preceding) / sizes.tensor, passes=(following, preceding))
        yield tensor("all_gather", count=2 * following + preceding, passes=(preceding, 2 * following))
        if self.embedding(rank):
            yield Traffic(
                what="gradients",
                operation="all_reduce",
                group_size=sum(bool(self.embedding(each)) for each in setup.first_ranks),
                payload_bytes=FULL * setup.model.padded_vocab_size * setup.model.n_embd,
                axis="pipeline",
                calls=1,
                once={(BEFORE_STEP, None): 1},
            )

    def _streams(
        self, operation: str, *, axis: str, ranks: int, count: float, calls: int, passes: Shares, width: int = FULL
    ) -> Traffic:
        """So many residual streams of a rank, (B, T, C), wBTC bytes each, and calls in every micro batch."""
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
        """Between the ranks that hold the same parameters. ZeRO-0 and 1: gradients once per step, wP.

        ZeRO-2: in every micro batch. Stages 1 and 2: then weights, wP. They all-reduce gradients, although a rank needs
        only its part, unless they reduce each piece of a bucket to the one rank that steps on it.
        """
        return [self.reduced("all_reduce", self.elements(rank))]

    def reduced(self, operation: str, elements: int) -> Traffic:
        """The gradients of so many elements, as often as a step reduces them.

        The calls follow from the recipe's bucket: a smaller one that holds all gradients sends no more messages.
        """
        zero, width = self.setup.recipe.zero_optimization, self.gradient_width
        size = self.reductions * width * elements
        return Traffic(
            what="gradients",
            operation=operation,
            group_size=self.setup.zero_ranks,
            payload_bytes=size,
            summed_width=width,
            calls=self.reductions + math.ceil(size / (width * zero.reduce_bucket_size)),
            passes=(0, int(self.reduces_each_micro_batch)),
            once={} if self.reduces_each_micro_batch else {self.reduction_place: 1},
            **self.overlap,
        )

    @property
    def overlap(self) -> dict[str, Any]:
        """With ``overlap_comm``, all pieces but the embedding's hide behind the backward passes that reduce gradients.

        At stage 3 they hide behind half of the computation.
        """
        zero, layers, count = self.setup.recipe.zero_optimization, self.setup.model.n_layer, self.reductions
        if not zero.overlap_comm or not zero.stage:
            return {}
        return {"behind": (count / 2, count / 2) if zero.stage == 3 else (0, count), "hidden": layers / (layers + 1)}

    @property
    def reduction_place(self) -> Place:
        """Where gradients are reduced once in a step."""
        return BEFORE_STEP, None

    # Copies to the host.

    def copied(self, rank: int) -> Iterator[Copied]:
        """Gradients to the host; new weights back; moments and master weights from files and back."""
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
        """What adding up in the host costs in each micro batch: its number, bytes to the host, and bytes back."""
        yield from ()

    # Time.

    @property
    def overlap_in_words(self) -> str:
        """What the prediction hides behind computation on GPUs."""
        zero = self.setup.recipe.zero_optimization
        if not zero.overlap_comm or not zero.stage:
            return "nothing overlaps"
        if zero.stage == 3:
            return "weights and gradients overlap with computation (overlap_comm)"
        return "gradients overlap with the backward pass (overlap_comm); weights do not"

    def divided(self) -> int:
        """Gradients are divided by the ranks: 2w."""
        reducing = self.setup.world_size if self.setup.uses_bf16_optimizer else self.setup.zero_ranks
        if reducing == 1 and self.setup.recipe.zero_stage == 1:
            return 0
        return 2 * self.gradient_width * self.reductions

    def divided_in_fp32(self) -> int:
        """The same, if it is not arithmetic in 16-bit precision."""
        return self.divided() if self.gradient_width == FULL else 0

    def low_arithmetic_bytes(self, rank: int) -> int:
        """The division of gradients by the ranks, and the search for extremes, 2w."""
        low = self.gradient_width != FULL
        return self.elements(rank) * (self.divided() + 2 * self.setup.low * self.searches_extremes) if low else 0


class Zero0(DeepSpeed):
    """Every rank has the whole model state of its part of the model."""

    searches_extremes = True

    def model_state(self, rank: int) -> ModelState:
        """As DDP in fp32. In bf16 and fp16 DeepSpeed has gradients in both precisions: wP + 4P."""
        elements, low, mixed = self.elements(rank), self.setup.low, self.setup.precision != "fp32"
        return ModelState(
            parameters=low * elements,
            gradients=(low + FULL if mixed else FULL) * elements,
            optimizer=self.optimizer_state(elements, tensors=len(self.setup.parameters(rank))),
            master=FULL * elements if mixed else 0,
        )

    def start_bytes(self, rank: int, device: str) -> int:  # noqa: ARG002 - of all strategies
        """In bf16 and fp16 all of the model state, because DeepSpeed takes a step on gradients of zero."""
        state = self.model_state(rank)
        return state.gradients + state.optimizer if self.setup.low != FULL else 0

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Gradients once: wP, and a flat copy of them to reduce. In bf16 and fp16 another one in fp32: 4P.

        This package adds up micro batches in fp32 then, on a CPU with a cast of each gradient.
        """
        setup, elements, embedding = self.setup, self.elements(rank), self.embedding(rank)
        several, separate = setup.gradient_accumulation_steps > 1, setup.low != FULL
        new, flat = setup.low * elements, setup.low * min(_AT_ONCE, elements)
        earlier = FULL * elements if several else 0
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
        """A flat copy, 2w, and back, 2w; in fp32 the division by the ranks.

        In low precision the sum of several micro batches is rounded, w + 4, and every gradient is copied to fp32,
        w + 4.
        """
        low = self.setup.low
        rounded = low + FULL if self.setup.gradient_accumulation_steps > 1 else 0
        mixed = 0 if self.setup.precision == "fp32" else rounded + low + FULL
        return 4 * low + self.divided_in_fp32() + mixed


class Flat(DeepSpeed):
    """ZeRO-1 and 2: one flat buffer for each group of the optimizer, of which every rank has a part."""

    copies_to_buckets = True

    @property
    def distinct_ranks(self) -> range:
        """In fp32 gradients are dealt unevenly, in whole parameters, to the ranks that share the same parameters."""
        setup = self.setup
        return range(0, setup.world_size, setup.sizes.tensor) if setup.precision == "fp32" else setup.first_ranks

    def part(self, rank: int) -> int:
        """The index of ``rank`` among the ranks that share the same parameters; tensor peers are innermost."""
        return rank // self.setup.sizes.tensor % self.setup.zero_ranks

    def touched(self, rank: int) -> int:
        """Elements of the parameters that lie in the rank's parts, counted whole even where only a piece does."""
        return sum(group.touched(self.part(rank)) for group in self.groups(rank))

    def stepped_elements(self, rank: int) -> int:
        """Its parts."""
        return sum(group.part for group in self.groups(rank))

    def padded_elements(self, rank: int) -> int:
        """All parts."""
        return sum(group.padded for group in self.groups(rank))

    def model_state(self, rank: int) -> ModelState:
        """WP of parameters, 4mP/N of moments; 4P/N of master weights unless in fp32.

        With offload there are master weights in fp32, too (``step_on_weights``). In bf16 and fp16 only the copy of the
        gradients that the host steps on is in the host.
        """
        setup, groups, own = self.setup, self.groups(rank), self.stepped_elements(rank)
        mixed = setup.precision != "fp32"
        gradients = self.offloaded_gradients(rank) if self.steps_on_host else self._own_gradients(rank)
        master, optimizer = FULL * own, self.optimizer_state(own, tensors=len(groups))
        moved = {"gradients": FULL * own if mixed else gradients, "optimizer": optimizer, "master": master}
        return ModelState(
            parameters=setup.low * self.padded_elements(rank),
            gradients=gradients,
            optimizer=optimizer,
            master=master if mixed or self.steps_on_host else 0,
            off_device=moved if self.steps_on_host else {},
        )

    def _own_gradients(self, rank: int) -> int:
        """About 2 x 4P/N in fp32: the reduced gradients, and the flat copy that the optimizer steps on.

        They are kept in one buffer of whole parameters: one that lies on the border of two ranks counts on both. The
        optimizer steps on one group after the other, and makes a flat copy only of that group. A part within a single
        parameter needs no copy. Without ``contiguous_gradients`` the group's own gradients are freed before its step.
        In bf16 and fp16 the reduced gradients are a flat fp32 buffer from the start: 4P/N.
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
        """Gradients in fp32 when the flat copy of the largest group has been made, before its own are freed."""
        copies = (0 if group.is_one_piece(self.part(rank)) else group.part for group in self.groups(rank))
        return FULL * (self.touched(rank) + max(copies))

    def offloaded_gradients(self, rank: int) -> int:
        """Bytes of gradients in the host and on the device."""
        raise NotImplementedError

    def start_bytes(self, rank: int, device: str) -> int:
        """The rank's part of the weights, cloned, before it is cast to fp32 and moved to its place.

        Later, if nothing is offloaded, gradients of zero. The weights are made flat in one more copy, on a GPU only if
        it has room for that (``flatten_on_accelerator`` of ``DeepSpeedZeroOptimizer``), but always by
        ``BF16_Optimizer``.
        """
        setup, groups = self.setup, self.groups(rank)
        other = setup.low * max(group.part for group in groups)
        if not self.steps_on_host:
            other = max(other, FULL * self.stepped_elements(rank))
        if device == "cpu" or setup.uses_bf16_optimizer:
            other = max(other, setup.low * max(group.padded for group in groups))
        return other

    def stepped_gradients(self, rank: int, device: str) -> tuple[int, int]:
        """Gradients on the device in the step, and those that the host keeps in the same memory after it."""
        state = self.model_state(rank)
        away = state.off_device.get("gradients", 0)  # in the host, which keeps the memory
        return (state.gradients, away) if device == "cpu" else (state.gradients - away, 0)

    def with_offload_buffers(self, moments: list[Moment], rank: int, device: str) -> list[Moment]:
        """With offload, a buffer as large as the largest parameter; in the host one more, and for the new weights."""
        if not self.steps_on_host:
            return moments
        other = self.setup.low * max(part.numel for part in self.setup.parameters(rank))
        if device == "cpu":
            other = 2 * other + self.setup.low * self.stepped_elements(rank)
        return [replace(each, parts={**each.parts, "other": each.parts.get("other", 0) + other}) for each in moments]

    def zero_traffic(self, rank: int) -> list[Traffic]:
        """Gradients, and then weights."""
        operation = "reduce" if self.reduces_to_owner else "all_reduce"
        weights = Traffic(
            what="weights",
            operation="all_gather",
            group_size=self.setup.zero_ranks,
            payload_bytes=self.setup.low * self.padded_elements(rank),
            calls=2,
            once={(AFTER_STEP, None): 1},
        )
        return [self.reduced(operation, self.elements(rank)), weights]

    @property
    def reduces_to_owner(self) -> bool:
        """Whether each piece of a bucket is reduced to the one rank that steps on it.

        As the recipe says; ``BF16_Optimizer`` never does it.
        """
        zero = self.setup.recipe.zero_optimization
        if self.setup.uses_bf16_optimizer:
            return False
        return zero.reduce_scatter and zero.contiguous_gradients and not zero.use_multi_rank_bucket_allreduce


class Zero1(Flat):
    """ZeRO-1 in fp32 and fp16, and with offload in bf16."""

    def offloaded_gradients(self, rank: int) -> int:
        """4P/N in host memory, and whole gradients on the device, which are added up there.

        In fp32 those are freed before the step. In bf16 and fp16 nearly all of them, except those of the last buckets,
        are freed only after it.
        """
        whole = self.padded_elements(rank) if self.setup.precision != "fp32" else 0
        return FULL * (self.stepped_elements(rank) + whole)

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Gradients of several micro batches: wP, in 16-bit precision in fp32.

        At the end they go through the bucket.
        """
        setup, elements, embedding = self.setup, self.elements(rank), self.embedding(rank)
        several, bucket = setup.gradient_accumulation_steps > 1, self.bucket_bytes(FULL)
        earlier = {"gradients": FULL * elements if several else 0, "buckets": bucket if several else 0}
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

    @property
    def reduction_place(self) -> Place:
        """In the last backward pass if they overlap with it."""
        return self.last_backward if self.setup.recipe.zero_optimization.overlap_comm else (BEFORE_STEP, None)

    def copied_around_reductions(self) -> float:
        """To the bucket and back, 4w, unless a rank is alone; the own part in fp32 made flat, 8/n."""
        ranks = self.setup.zero_ranks
        return (4 * self.setup.low if ranks > 1 else 0) + self.divided_in_fp32() + 2 * FULL / ranks


class Bf16Optimizer(Flat):
    """ZeRO-1 in bf16 without offload: DeepSpeed's ``BF16_Optimizer``."""

    def model_state(self, rank: int) -> ModelState:
        """All gradients twice, 2P + 4P; 4mP/N of moments, 4P/N of master weights.

        With ``immediate_grad_update`` each bf16 gradient is freed as soon as it is added to the fp32 one.
        """
        whole, own, low = self.padded_elements(rank), self.stepped_elements(rank), self.setup.low
        return ModelState(
            parameters=low * whole,
            gradients=(0 if self._frees_gradients else low * self.elements(rank)) + FULL * whole,
            optimizer=self.optimizer_state(own, tensors=len(self.groups(rank))),
            master=FULL * own,
        )

    @property
    def _frees_gradients(self) -> bool:
        bf16 = self.setup.recipe.bf16
        return bf16 is not None and bf16.immediate_grad_update

    def moments(self, rank: int, device: str) -> list[Moment]:  # noqa: ARG002 - of all strategies
        """fp32 sums of all gradients, 4P, all the time. They are reduced from copies in fp32 and bf16.

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
        """A flat copy of the fp32 sums and back, 16; in between to bf16 and back, 2w + 8.

        Sequence ranks stay in fp32. With several micro batches the gradients in bf16 stay: each is set to zero, w, and
        later ones are added to it, 3w.
        """
        micro_batches, low = self.setup.gradient_accumulation_steps, self.setup.low
        copied = low * micro_batches + 3 * low * (micro_batches - 1) if micro_batches > 1 else 0
        if self.setup.world_size > 1:
            copied += 4 * FULL + (2 * low + 2 * FULL if self.gradient_width == low else 0)
        return copied + self.divided_in_fp32()


class Zero2(Flat):
    """A full bucket is reduced at once, into the sums of this rank's part."""

    reduces_each_micro_batch = True

    def offloaded_gradients(self, rank: int) -> int:
        """4P/N in host memory, and their sum: in fp32 with several micro batches, of whole parameters.

        In bf16 and fp16 that sum is a flat buffer of the rank's part on the device
        (``_get_compact_grad_partition_buffer`` of ``DeepSpeedZeroOptimizer``); in fp32 it is in the host.
        """
        own = self.stepped_elements(rank)
        if self.setup.precision != "fp32":
            return FULL * 2 * own
        return FULL * (own + (self.touched(rank) if self.reductions > 1 else 0))

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Buckets are reduced from a flat copy.

        Of reduced gradients, ZeRO-2 keeps in fp32 whole parameters that the rank's part touches, in bf16 and fp16 the
        part alone, in fp32. With offload the host has memory for a copy of them all the time, which on a CPU is in the
        same memory; the sums are as large as in the step.
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
        """In fp32 whole parameters of which the rank has a part (``async_accumulate_grad_in_cpu_via_gpu``).

        In bf16 and fp16 it adds up on the device.
        """
        if self.setup.precision == "fp32" and self.reductions > 1:
            whole = FULL * self.touched(rank)
            for number in range(self.reductions):
                yield number, whole, whole if number else 0

    def copied_around_reductions(self) -> float:
        """To the bucket and from it to a flat copy, 4w; the own part added to its sum, (w + 8)/n."""
        low = self.setup.low
        each = 4 * low + (low + 2 * FULL) / self.setup.zero_ranks
        return self.reductions * each + self.divided_in_fp32()


_OPERATIONS_PER_PASS = 100
"""Operations for each parameter in each pass over the blocks: hooks look up, gather, wait for and release parameters in
Python. On a CPU nothing else runs."""


class Zero3(DeepSpeed):
    """Every rank has a piece of each parameter; weights are gathered for each layer."""

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
        """Parameters that every rank has whole, too."""
        return persistent(self.setup.recipe.zero_optimization, self.setup.parameters(rank))

    @property
    def gathered(self) -> Gathers:
        """What a micro batch gathers."""
        return gathers_of(self.setup)

    def stepped_elements(self, rank: int) -> int:
        """Its pieces."""
        return self.pieces(self.setup.parameters(rank))

    def model_state(self, rank: int) -> ModelState:
        """wP/N of parameters, up to 8P/N of gradients, 4mP/N of moments, 4P/N of master weights.

        Parameters that persist are also held whole. There are two copies of the gradients. The optimizer steps on the
        second: one sub-group's at a time, or with offload all.
        With offload to NVMe, tensors that are large enough to be swapped are in files, which no measurement of memory
        sees.
        """
        setup, ranks = self.setup, self.setup.zero_ranks
        own, sub_groups = self.stepped_elements(rank), self.sub_groups(rank)
        whole = ranks * self.pieces(self.persistent(rank)) if ranks > 1 else 0  # one rank's pieces are the parameters
        second = own if self.steps_on_host else max(sub_groups)
        sizes = {
            "parameters": setup.low * (own + whole),
            "gradients": FULL * (own + second),
            "optimizer": self.optimizer_state(own, tensors=len(sub_groups)),
            "master": FULL * own,
        }
        stays = set() if self.steps_on_host else {"gradients", "optimizer", "master"}
        stays |= {"parameters"} if setup.recipe.offload_param == "none" else set()
        return ModelState(**sizes, off_device={name: size for name, size in sizes.items() if name not in stays})

    def gathered_to_save(self) -> int:
        """The embedding, too, from an evaluation."""
        return super().gathered_to_save() + embedding_bytes(self.setup)

    def start_bytes(self, rank: int, device: str) -> int:  # noqa: ARG002 - of all strategies
        """The embedding, whole, in fp32 and in the precision of the run (``zero.Init``)."""
        return (FULL + self.setup.low) * self.setup.model.largest_parameter()

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Gathered weights, a flat buffer of this rank's gradients, the bucket; in the step a second copy of those.

        Weights that are gathered together stay in the buffer of their all-gather until the last of them has been used.
        So they exist twice during the forward pass, and the embedding once more if it has been freed. On a CPU those
        that are being gathered exist twice as well, because gloo copies them. A full bucket is reduced from a copy in
        the order of the ranks, and gloo makes one more.
        """
        setup, layers, embedding = self.setup, self.setup.model.n_layer, embedding_bytes(self.setup)
        own, most = self.stepped_elements(rank), self.gathered.most_live
        sums, stepped = FULL * own, FULL * (own + max(self.sub_groups(rank)))
        if self.steps_on_host:  # both copies exist in the host all the time
            sums = stepped = 2 * sums if device == "cpu" else 0
        base = {"gradients": sums, "buckets": self.bucket_bytes(setup.low)}
        whole = setup.low * most
        together = setup.low * min(setup.recipe.zero_optimization.stage3_prefetch_bucket_size, most)
        freed = embedding if [part.name for part in self.gathered.all].count(EMBEDDING) > 1 else 0
        buffers = freed + (whole if device == "cpu" else together)
        copies = 2 if device == "cpu" else 1
        moments = [
            Moment(name="forward", blocks=layers, parts=base | {"gathered": whole + buffers}),
            Moment(name="loss", blocks=layers, parts=base | {"gathered": whole}),
            Moment(name="backward", blocks=layers, parts=base | {"gathered": whole, "new_gradients": embedding}),
            Moment(name="step", parts=base | {"gradients": stepped}),
            Moment(name="evaluation", parts=base | {"gathered": whole}),
        ]
        for fill in self.bucket_fills(setup.parameters(rank)):
            buckets = base["buckets"] + copies * setup.low * fill.elements
            waits = 0 if fill.has_embedding else embedding
            parts = {"buckets": buckets, "new_gradients": waits, "gathered": min(whole, embedding)}
            moments.append(Moment(name="reduction", blocks=fill.blocks, parts=base | parts))
        return moments

    def zero_traffic(self, rank: int) -> list[Traffic]:
        """In every micro batch weights for the forward and the backward pass, and gradients; persistent ones once.

        About a x (2wP + wP) + w x what persists. Gradients are reduced each piece to its rank, or in a bucket by an
        all-reduce.
        """
        setup, zero = self.setup, self.setup.recipe.zero_optimization
        in_buckets = zero.contiguous_gradients and not zero.reduce_scatter
        limit = setup.reduce_bucket_size if in_buckets else 0
        alone = [part for part in setup.parameters(rank) if part.numel > limit]
        bucketed = total(part for part in setup.parameters(rank) if part.numel <= limit)
        reduced = {"reduce_scatter": setup.zero_ranks * self.pieces(alone), "all_reduce": bucketed}
        return [*self.gathers(rank), *(self.reduced(operation, count) for operation, count in reduced.items())]

    def gathers(self, rank: int) -> list[Traffic]:
        """Of weights: each call has two parameters, weight and bias of a layer. What persists follows the step."""
        setup, ranks, passes = self.setup, self.setup.zero_ranks, self._pieces_of_passes()
        persistent = self.pieces(self.persistent(rank))
        return [
            Traffic(
                what="weights",
                operation="all_gather",
                group_size=ranks,
                payload_bytes=setup.low * ranks * (self.reductions * sum(passes) + persistent),
                calls=self.reductions * len(self.gathered.all) // 2 + 1,
                passes=passes,
                once={(AFTER_STEP, None): persistent},
                **self.overlap,
            )
        ]

    def _pieces_of_passes(self) -> tuple[int, int]:
        """Elements of a rank's pieces of what the forward pass gathers, and the backward pass."""
        forward = self.pieces(self.gathered.forward)
        return forward, self.pieces(self.gathered.all) - forward

    def copied(self, rank: int) -> Iterator[Copied]:
        """The rank's pieces of weights before every gather, too."""
        yield from super().copied(rank)
        offload = self.setup.recipe.offload_param
        links = {"none": (), "cpu": ("host",), "nvme": ("files", "host")}[offload]
        pieces = dict(zip((FORWARD, BACKWARD), self._pieces_of_passes(), strict=True))
        for number in range(self.reductions):
            for moment, elements in pieces.items():
                weights = partial(Copied, moment=moment, micro_batch=number, what="weights", to_device=True)
                yield from (weights(link=link, size=self.setup.low * elements) for link in links)

    def summed_in_host(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """fp32 sums of the rank's part, which go to the device and back.

        Even the first one, which only replaces the sum, comes back (``partition_grads``).
        """
        whole = FULL * self.stepped_elements(rank)
        yield from ((number, whole, whole) for number in range(self.reductions))

    @property
    def hook_operations(self) -> int:
        """Of its hooks, in a micro batch."""
        return _OPERATIONS_PER_PASS * (3 if self.setup.activation_checkpointing else 2) * len(self.setup.parameters(0))

    def copied_around_reductions(self) -> float:
        """To the bucket, 2w; the own part added to its sum, (w + 8)/n."""
        low = self.setup.low
        each = 2 * low + (low + 2 * FULL) / self.setup.zero_ranks
        return self.reductions * each + self.divided_in_fp32()


# The choice, and what follows for the ranks of a setup.

_PYTORCH: dict[str, type[Planned]] = {"baseline": Baseline, "ddp": Ddp, "fsdp": Fsdp}
_ZERO: dict[int, type[Planned]] = {0: Zero0, 1: Zero1, 2: Zero2, 3: Zero3}


def strategy_of(setup: Setup) -> Planned:
    """The formulas of the setup's strategy. A new run type needs a class here."""
    if setup.run_type != "optimized":
        return _PYTORCH[setup.run_type](setup)
    return Bf16Optimizer(setup) if setup.uses_bf16_optimizer else _ZERO[setup.recipe.zero_stage](setup)


def model_state(setup: Setup, *, rank: int = 0) -> ModelState:
    """The model state of ``rank``."""
    return strategy_of(setup).model_state(rank)


def largest_model_state(setup: Setup) -> ModelState:
    """The model state of the rank that has the most."""
    strategy = strategy_of(setup)
    return max(map(strategy.model_state, strategy.distinct_ranks), key=lambda state: state.total)


def step_traffic(setup: Setup, *, rank: int = 0) -> list[Traffic]:
    """What ``rank`` sends in one optimizer step. Groups of one rank send nothing and are left out."""
    every = strategy_of(setup).traffic(rank)
    return [traffic for traffic in every if traffic.group_size > 1 and traffic.payload_bytes]


def sent_bytes(setup: Setup, *, rank: int = 0) -> int:
    """Bytes that ``rank`` sends in one optimizer step."""
    return sum(traffic.ring_bytes for traffic in step_traffic(setup, rank=rank))


def most_sent_bytes(setup: Setup) -> int:
    """Bytes that the rank with the most traffic sends in one optimizer step."""
    return max(sent_bytes(setup, rank=rank) for rank in setup.first_ranks)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The forward or the backward pass of one micro batch."""

    kind: str
    """``forward`` or ``backward``."""
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Traffic at its place in the step."""

    moment: str
    """``forward``, ``backward``, ``before the step`` or ``after the step``."""
    micro_batch: int | None
    """None outside of passes."""
    traffic: Traffic
    """With the payload of this place."""


def passes(setup: Setup, *, rank: int = 0) -> list[Pass]:
    """The passes of ``rank`` in one optimizer step, in order.

    A pipeline's stage begins with as many forward passes as stages follow it, and then alternates.
    """
    ahead = setup.micro_batches_in_flight(rank)
    order = [Pass(kind=FORWARD, micro_batch=number) for number in range(ahead)]
    for number in range(setup.gradient_accumulation_steps):
        order.append(Pass(kind=BACKWARD, micro_batch=number))
        if number + ahead < setup.gradient_accumulation_steps:
            order.append(Pass(kind=FORWARD, micro_batch=number + ahead))
    return order


def placed_traffic(setup: Setup, *, rank: int = 0) -> list[Placed]:
    """What ``rank`` sends in one optimizer step, and where in it; the parts add up to ``step_traffic``."""
    placed = []
    for traffic in step_traffic(setup, rank=rank):
        places = traffic.places(setup.gradient_accumulation_steps)
        whole = sum(places.values())
        for (moment, number), share in places.items():
            if share:
                there = replace(traffic, payload_bytes=traffic.payload_bytes * share // whole)
                placed.append(Placed(moment=moment, micro_batch=number, traffic=there))
    return placed


def copied(setup: Setup, *, rank: int = 0) -> list[Copied]:
    """What offload makes ``rank`` copy; nothing without offload."""
    return [each for each in strategy_of(setup).copied(rank) if each.size]
