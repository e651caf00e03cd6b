"""Formulas for a strategy's model state, moments, traffic and copies: the contract, and PyTorch's strategies.

``Planned`` is the contract. The classes of DeepSpeed's strategies are in ``dsgpt.planner.deepspeed_formulas``;
``dsgpt.planner.formulas`` chooses the class of a setup.

The formulas describe this package, PyTorch 2.13 and DeepSpeed 0.19.8. Their letters:

* P: the parameters of a rank, padded embedding rows included; E those of the embedding;
* w: the bytes of a number in the precision of the activations, 4 in fp32, 2 in bf16 and fp16;
* m: the numbers that the optimizer keeps per weight, 2 for Adam;
* N, n: the ranks that share the state, or that reduce;
* a: the gradient accumulation steps.

Model state leaves out buckets, activations and weights that are gathered for a layer; see ``ds_configs/README.md``.
Traffic leaves out losses, norms and counters, a few bytes each.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dsgpt.machine.topology import ring_factor
from dsgpt.planner.setup import FULL, Setup, fsdp_elements, total

FORWARD, BACKWARD = "forward", "backward"
BEFORE_STEP, DURING_STEP, AFTER_STEP = "before the step", "during the step", "after the step"
Place = tuple[str, int | None]
"""A moment of the step and its micro batch; no micro batch outside of the passes."""
Shares = tuple[int, int]
"""Shares of a traffic: in the forward pass and in the backward pass of every micro batch."""
MIB = 1 << 20
_UNFUSED_ADAM = 20
"""Numbers that PyTorch's AdamW reads and writes for each weight in nine operations, as it does in pipelines."""


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Bytes of model state on one rank; ``dsgpt.telemetry.cost`` measures them."""

    parameters: int
    """The weights that the forward pass uses, as they are kept between steps."""
    gradients: int
    """Gradients while the optimizer steps, after most communication buffers have been freed."""
    optimizer: int
    """Moments, and torch's counter of steps, 4 bytes for each tensor that its Adam steps on."""
    master: int
    """fp32 weights in addition to the parameters."""
    off_device: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each of the four in host memory, or in files of the run, instead of on the device."""

    @property
    def total(self) -> int:
        """Sum of the four, on the device and off it."""
        return self.parameters + self.gradients + self.optimizer + self.master

    @property
    def on_device(self) -> int:
        """Bytes on the device."""
        return self.total - sum(self.off_device.values())


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of a training at which memory can be highest."""

    name: str
    """Name of the moment, one of ``formulas.MOMENTS``."""
    blocks: int = 0
    """Number of blocks that have activations."""
    parts: Mapping[str, int]
    """Bytes besides model state and activations, by the names of ``formulas.PARTS``."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Operations of one kind of one rank in one optimizer step; ``dsgpt.telemetry.cost`` measures them."""

    what: str
    """``gradients`` (of weights), ``weights``, or ``activations`` and their gradients."""
    operation: str
    """A name that ``ring_factor`` knows."""
    group_size: int
    """Number of ranks that take part."""
    payload_bytes: int
    """Bytes of the buffer, as ``dsgpt.machine.topology`` defines them."""
    summed_width: int = FULL
    """Bytes per summed number: summing 16-bit numbers may take longer than sending them."""
    axis: str = "data"
    """The group of ranks that takes part: ``data``, ``tensor``, ``sequence`` or ``pipeline``."""
    calls: int
    """Number of collective operations per step that send it."""
    passes: Shares = (0, 0)
    """Shares of the payload in the forward pass and in the backward pass of every micro batch."""
    once: Mapping[Place, int] = field(default_factory=dict)
    """Additional shares at single places of the step."""
    behind: tuple[float, float] = (0, 0)
    """Numbers of forward passes and of backward passes of a micro batch during which a GPU sends it."""
    hidden: float = 0.0
    """Share of its time that these passes hide, if they take long enough."""

    @property
    def ring_bytes(self) -> int:
        """Bytes that the rank sends if the collectives are rings."""
        return round(self.payload_bytes * ring_factor(self.operation, self.group_size))

    def places(self, micro_batches: int) -> dict[Place, int]:
        """Share of the payload at each place of a step of ``micro_batches``."""
        shares: dict[Place, int] = {}
        for number in range(micro_batches):
            shares[FORWARD, number], shares[BACKWARD, number] = self.passes
        return shares | {place: share + shares.get(place, 0) for place, share in self.once.items()}


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Bytes that are copied between a device and its host, or its files, at one place of the step."""

    moment: str
    """``forward``, ``backward``, or ``before``, ``during`` or ``after the step``."""
    micro_batch: int | None
    what: str
    """``gradients``, ``weights`` or ``optimizer state``."""
    link: str
    """``host``, or ``files`` of the host."""
    to_device: bool
    """True for a copy to the device, False for a copy from it."""
    size: int


def embedding_bytes(setup: Setup) -> int:
    """Bytes of the embedding's gradient (wE), in the precision of the activations; the lookup's is dense, too."""
    return setup.low * setup.embedding_elements


@dataclass(frozen=True)
class Planned:
    """The formulas of a strategy. Arguments: ``rank`` of all ranks; ``device`` is ``cpu`` or ``cuda``."""

    setup: Setup

    operations_per_tensor: ClassVar[int]
    """Operations per parameter and micro batch besides matrix products: hooks, casts, copies to buckets."""
    reduces_each_micro_batch: ClassVar[bool] = False
    """Whether gradients are reduced in every backward pass instead of once per step."""
    copies_to_buckets: ClassVar[bool] = False
    """Whether time on GPUs includes copying every reduced gradient to a bucket, 2w bytes per element."""

    @property
    def overlap_in_words(self) -> str:
        """Sentence for the plan: which communication overlaps with computation on GPUs."""
        return "nothing overlaps"

    @property
    def hook_operations(self) -> int:
        """Python operations of ZeRO-3's hooks per micro batch; 0 for other strategies."""
        return 0

    @property
    def reductions(self) -> int:
        """Number of times that a step reduces each gradient."""
        return self.setup.gradient_accumulation_steps if self.reduces_each_micro_batch or self.adds_shards else 1

    @property
    def adds_shards(self) -> bool:
        """Whether the gradients of each micro batch are reduced, and added to a rank's shard."""
        return False

    @property
    def steps_on_host(self) -> bool:
        """Whether the host executes the optimizer's step."""
        return False

    @property
    def distinct_ranks(self) -> range:
        """Ranks that may hold different sizes: the first of each stage, whose other ranks hold the same."""
        return self.setup.first_ranks

    def model_state(self, rank: int) -> ModelState:
        """The bytes of model state of ``rank``.

        Here of a rank that has all: parameters wP, gradients, summed in fp32, 4P, moments 4mP, master weights 4P unless
        in fp32.
        """
        elements, low = self.elements(rank), self.setup.low
        return ModelState(
            parameters=low * elements,
            gradients=FULL * elements,
            optimizer=self.optimizer_state(elements, tensors=len(self.setup.parameters(rank))),
            master=FULL * elements if low != FULL else 0,
        )

    def start_bytes(self, rank: int, device: str) -> int:  # noqa: ARG002 - of all strategies
        """Bytes besides weights and master weights while the optimizer is built."""
        return 0

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Memory moments of a step after the first, and of an evaluation."""
        raise NotImplementedError

    def traffic(self, rank: int) -> list[Traffic]:  # noqa: ARG002 - of all strategies
        """Traffic of ``rank`` in one optimizer step; groups of one rank may be among it."""
        return []

    @property
    def last_backward(self) -> Place:
        """The last backward pass of the step."""
        return BACKWARD, self.setup.gradient_accumulation_steps - 1

    def copied(self, rank: int) -> Iterable[Copied]:  # noqa: ARG002 - of all strategies
        """Copies between device and host of ``rank`` in one optimizer step, caused by offload."""
        return ()

    def elements(self, rank: int) -> int:
        """Number of elements of the parameters of ``rank`` (P)."""
        return total(self.setup.parameters(rank))

    def stepped_elements(self, rank: int) -> int:
        """Number of elements that the optimizer of ``rank`` updates."""
        return self.elements(rank)

    def copied_around_reductions(self) -> float:
        """Bytes per element that a CPU reads and writes in copies around the reductions of a step."""
        return 0

    def low_arithmetic_bytes(self, rank: int) -> int:  # noqa: ARG002 - of all strategies
        """Bytes of gradients in 16-bit arithmetic, which a CPU executes at the rate of elementwise operations."""
        return 0

    # What follows from the above, for every strategy.

    def before_reduction(self, rank: int, earlier: dict[str, int], *, bucket: int = 0) -> list[Moment]:
        """Moments of the loss and of the backward pass's beginning, with bytes that ``earlier`` micro batches left.

        The bucket is allocated when the first gradient comes.
        """
        blocks = self.setup.blocks(rank)
        head = embedding_bytes(self.setup) if self.setup.computes_loss(rank) else 0
        gradients, buckets = earlier.get("new_gradients", 0) + head, max(bucket, earlier.get("buckets", 0))
        return [
            Moment(name="loss", blocks=blocks, parts=earlier),
            Moment(name="backward", blocks=blocks, parts=earlier | {"new_gradients": gradients, "buckets": buckets}),
        ]

    def gradient_bytes(self, rank: int, *, kind: str) -> float:
        """Bytes read and written to accumulate gradients, copy them to buckets and back, and copy gathered weights.

        In low precision every micro batch's gradients are added to a sum in fp32, w + 8 bytes per element; in fp32
        those after the first are, 12 bytes. On a CPU each gather reads and writes the rank's part before, and all parts
        after. FSDP that reduces every micro batch adds in the rank's shard alone.
        """
        setup = self.setup
        elements, micro_batches = self.elements(rank), setup.gradient_accumulation_steps
        adding = 12 * (micro_batches - 1) if setup.precision == "fp32" else (setup.low + 8) * micro_batches
        if self.adds_shards:
            adding //= setup.world_size
        if kind != "cpu":
            return elements * (adding + (2 * setup.low * self.reductions if self.copies_to_buckets else 0))
        gathers = [each for each in self.gathers(rank) if each.payload_bytes and each.group_size > 1]
        copies = sum(2 * each.payload_bytes * (1 + 1 / each.group_size) for each in gathers)
        return elements * (adding + self.copied_around_reductions()) + copies

    def gathers(self, rank: int) -> list[Traffic]:  # noqa: ARG002 - of all strategies
        """The all-gathers of a strategy that gathers weights for every layer."""
        return []

    def optimizer_bytes(self, rank: int) -> float:
        """Bytes that the optimizer reads and writes: gradient, weight and each moment, 28 per element for fused Adam.

        In low precision it also writes the weight in that precision.
        """
        setup, numbers = self.setup, 1 + 2 * (1 + self.setup.moments)
        unfused = setup.sizes.pipeline > 1 and not setup.fused_adam
        unfused |= setup.kernels == "eager" and setup.run_type != "optimized"
        if unfused and setup.recipe.optimizer.type == "AdamW":
            numbers = _UNFUSED_ADAM
        return self.stepped_elements(rank) * (FULL * numbers + (0 if setup.precision == "fp32" else FULL + setup.low))

    def optimizer_state(self, elements: int, *, tensors: int) -> int:
        """Bytes of moments, 4m per element, and of Adam's counter per tensor, which DeepSpeed's CPU Adam lacks."""
        recipe, deepspeed = self.setup.recipe, self.setup.run_type == "optimized"
        counts = recipe.optimizer.type == "AdamW" and not (deepspeed and recipe.uses_deepspeed_adam)
        return self.setup.moments * FULL * elements + (FULL * tensors if counts else 0)


class Baseline(Planned):
    """Plain PyTorch on one device."""

    operations_per_tensor = 1

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Gradients: 4P for fp32 sums of several micro batches, wP for those of one, the embedding's briefly twice.

        In bf16 and fp16 they are added to the sums when all exist. On a CPU each is cast to fp32 first.
        """
        setup, elements = self.setup, self.elements(0)
        new, embedding, several = setup.low * elements, embedding_bytes(setup), setup.gradient_accumulation_steps > 1
        sums, separate = FULL * elements, setup.low != FULL
        earlier = sums if several else 0
        backward = 2 * embedding if several and not separate else new + embedding
        cast = FULL * setup.model.largest_parameter() if several and separate and device == "cpu" else 0
        return [
            *self.before_reduction(rank, {"gradients": earlier}),
            Moment(name="reduction", parts={"gradients": earlier, "new_gradients": backward}),
            Moment(name="step", parts={"gradients": sums, "new_gradients": new if separate else 0, "other": cast}),
            Moment(name="evaluation", parts={}),
        ]


class Ddp(Baseline):
    """Every rank has the whole model state."""

    operations_per_tensor = 2

    @property
    def overlap_in_words(self) -> str:
        """Sentence for the plan: which communication overlaps with computation on GPUs."""
        return "gradients overlap with the backward pass of the last micro batch, except the embedding's"

    def moments(self, rank: int, device: str) -> list[Moment]:  # noqa: ARG002 - all ranks have the same
        """Buckets wP for all gradients, and 4P for fp32 sums of several micro batches.

        A bucket is reduced in fp32. Its copy replaces the sum of its gradients, if there is one, when it is complete.
        The programs of others add up in the buckets.
        """
        setup, elements, embedding = self.setup, self.elements(0), embedding_bytes(self.setup)
        several = setup.gradient_accumulation_steps > 1 and setup.accumulation == "whole"
        copies = 1 if setup.recipe.dsgpt.ddp.gradient_as_bucket_view else 2
        buckets, separate = copies * setup.low * elements, setup.low != FULL
        earlier = {"buckets": buckets, "gradients": FULL * elements if several else 0}
        last_bucket, limit = 0, setup.recipe.dsgpt.ddp.bucket_cap_mb * MIB / setup.low
        for part in reversed(setup.parameters(0)):  # it has the embedding, and ends as soon as it has its size
            last_bucket = part.numel if last_bucket >= limit else last_bucket + part.numel
        reduced = FULL * (last_bucket if several else elements) if separate else 0
        pending = embedding if separate else 2 * embedding
        return [
            *self.before_reduction(rank, earlier),
            Moment(name="reduction", parts=earlier | {"new_gradients": pending, "other": reduced}),
            Moment(name="step", parts=earlier | {"gradients": FULL * elements if separate or several else 0}),
            Moment(name="evaluation", parts={"buckets": buckets}),
        ]

    def traffic(self, rank: int) -> list[Traffic]:  # noqa: ARG002 - all ranks have the same
        """One all-reduce of all gradients per step, in fp32 (4P), one call per bucket, the embedding's last."""
        setup, size = self.setup, FULL * self.elements(0)
        return [
            Traffic(
                what="gradients",
                operation="all_reduce",
                group_size=setup.world_size,
                payload_bytes=size,
                calls=math.ceil(size / (setup.recipe.dsgpt.ddp.bucket_cap_mb * MIB)),
                once={self.last_backward: 1},
                behind=(0, 1),
                hidden=1 - setup.model.padded_vocab_size * setup.model.n_embd / self.elements(0),
            )
        ]

    def copied_around_reductions(self) -> float:
        """Bytes per element: 2w to copy into the bucket, 8 to divide by the ranks in fp32."""
        return 2 * self.setup.low + 2 * FULL


class Fsdp(Planned):
    """Every rank has a shard of each parameter; a block's weights are gathered for each of its passes."""

    operations_per_tensor = 4

    @property
    def adds_shards(self) -> bool:
        """With FSDP's ``accumulation``, and for the trainings of others."""
        return "sharded" in {self.setup.accumulation, self.setup.recipe.dsgpt.fsdp.accumulation}

    @property
    def overlap_in_words(self) -> str:
        """Sentence for the plan: which communication overlaps with computation on GPUs."""
        return "weights and gradients overlap with the computation of blocks"

    def model_state(self, rank: int) -> ModelState:  # noqa: ARG002 - all ranks have the same
        """Parameters 4P/N, gradients 4P/N, moments 4mP/N.

        Each parameter is padded to the same number of rows on every rank. The shards are fp32 in every precision,
        so there are no separate master weights.
        """
        optimizer = self.optimizer_state(self.stepped_elements(0), tensors=len(self.setup.parameters(0)))
        size = FULL * self.stepped_elements(0)
        sizes = {"parameters": size, "gradients": size, "optimizer": optimizer}
        return ModelState(**sizes, master=0, off_device=sizes if self.steps_on_host else {})

    @property
    def steps_on_host(self) -> bool:
        """True with FSDP's ``cpu_offload``."""
        return self.setup.recipe.dsgpt.fsdp.cpu_offload

    def _sharded(self) -> tuple[int, int]:
        """Elements of a rank's shards: those of all blocks, and those of the root (embeddings and last LayerNorm)."""
        blocks = [part for part in self.setup.parameters(0) if part.name.startswith("blocks.")]
        sharded = fsdp_elements(blocks, self.setup.world_size)
        return sharded, self.stepped_elements(0) - sharded

    def moments(self, rank: int, device: str) -> list[Moment]:  # noqa: ARG002 - all ranks have the same
        """Whole weights of the root, of a block and of the next one; whole gradients until the last micro batch.

        Or, if every micro batch's are reduced, the shards of their sum, to which each block's are added.
        A block's gradients are reduced from a buffer that is freed when those of the next block are reduced. The first
        block of the backward pass needs none, but all activations still exist. On a CPU, gloo copies what it gathers
        and scatters.
        """
        setup = self.setup
        ranks, layers, recipe = setup.world_size, setup.model.n_layer, setup.recipe.dsgpt.fsdp
        blocks, root = (ranks * elements for elements in self._sharded())
        block = blocks // layers
        several = setup.gradient_accumulation_steps > 1 and self.reductions == 1
        copies = 1 if device == "cpu" else 0
        width = FULL if recipe.reduce_dtype == "fp32" else setup.low
        embedding = embedding_bytes(setup)
        away = recipe.cpu_offload and device == "cuda"
        shards, root_shard = (0, 0) if away else (FULL * blocks // ranks, FULL * root // ranks)
        sums = shards + root_shard if self.reductions > 1 else 0
        kept, flight = (1, (1 + copies) * block) if recipe.reshard_after_forward else (layers, 0)
        gathered = setup.low * (root + kept * block)
        backward = {"gathered": gathered + setup.low * flight, "buckets": width * block, "new_gradients": embedding}
        backward["gradients"] = (width * (blocks - block + root) if several else 0) + FULL * block // ranks + sums
        reduction = {"gathered": setup.low * root, "buckets": width * block, "new_gradients": 2 * embedding}
        reduction["gradients"] = shards + (width * root if several else root_shard if sums else 0)
        earlier = {"gradients": width * (blocks + root) if several else sums, "gathered": gathered}
        begun = earlier | {"gathered": backward["gathered"], "new_gradients": embedding}
        return [
            Moment(name="loss", blocks=layers, parts=earlier),
            Moment(name="backward", blocks=layers, parts=begun),
            Moment(name="backward", blocks=layers - 1, parts=backward),
            Moment(name="reduction", parts=reduction),
            Moment(name="step", parts={"gradients": shards + root_shard, "buckets": (1 + copies) * width * root}),
            Moment(name="evaluation", parts={"gathered": gathered}),
        ]

    def traffic(self, rank: int) -> list[Traffic]:  # noqa: ARG002 - all ranks have the same
        """All-gathers of weights, twice per block and micro batch, and one reduce-scatter of the gradients per step.

        Weights are sent in the precision of the computation. The root stays gathered for the step, and so do the
        blocks if ``reshard_after_forward`` is off. Activation checkpointing adds no third gather, because a block is
        recomputed while its weights are gathered for its backward pass. Each block has a call, and the root. The
        weights of the next block and the gradients of the previous one hide behind the computation of a block.
        """
        setup, ranks, layers = self.setup, self.setup.world_size, self.setup.model.n_layer
        micro_batches, recipe = setup.gradient_accumulation_steps, setup.recipe.dsgpt.fsdp
        width = FULL if recipe.reduce_dtype == "fp32" else setup.low
        blocks, root = self._sharded()
        gathers = 2 * micro_batches if recipe.reshard_after_forward else 1
        passes, first = ((blocks, blocks), root) if recipe.reshard_after_forward else ((0, 0), blocks + root)
        hidden = layers / (layers + 1)  # one of the pieces is the embedding's
        return [
            Traffic(
                what="weights",
                operation="all_gather",
                group_size=ranks,
                payload_bytes=setup.low * (gathers * blocks + root) * ranks,
                calls=gathers * layers + 1,
                passes=passes,
                once={(FORWARD, 0): first},
                behind=(micro_batches / 2, micro_batches / 2),
                hidden=hidden,
            ),
            Traffic(
                what="gradients",
                operation="reduce_scatter",
                group_size=ranks,
                payload_bytes=self.reductions * width * (blocks + root) * ranks,
                summed_width=width,
                calls=self.reductions * (layers + 1),
                passes=(0, int(self.reductions > 1)),
                once={} if self.reductions > 1 else {self.last_backward: 1},
                behind=(0, self.reductions),
                hidden=hidden,
            ),
        ]

    def gathers(self, rank: int) -> list[Traffic]:
        """The all-gathers of weights."""
        return self.traffic(rank)[:1]

    def copied(self, rank: int) -> Iterator[Copied]:
        """Copies of fp32 shards to the device before every gather, and of the gradients to the host once per step."""
        if not self.steps_on_host:
            return
        weights, _ = self.traffic(rank)
        for (moment, number), elements in weights.places(self.setup.gradient_accumulation_steps).items():
            size = FULL * elements
            yield Copied(moment=moment, micro_batch=number, what="weights", link="host", to_device=True, size=size)
        moment, last = self.last_backward
        size = FULL * self.stepped_elements(rank)
        yield Copied(moment=moment, micro_batch=last, what="gradients", link="host", to_device=False, size=size)

    def stepped_elements(self, rank: int) -> int:
        """Number of elements of the rank's shards."""
        return fsdp_elements(self.setup.parameters(rank), self.setup.world_size)

    def copied_around_reductions(self) -> float:
        """Bytes per element: w + 4 to copy into the reduce-scatter's buffer, 8/n to divide the rank's part."""
        return self.setup.low + FULL + 2 * FULL / self.setup.world_size
