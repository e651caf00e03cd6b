"""The formulas of ZeRO-3, and how often it gathers each parameter.

How often ZeRO-3 gathers is computed as DeepSpeed's ``PartitionedParameterCoordinator`` does. A layer's parameters are
gathered before its forward and its backward pass, and freed after each. Small ones persist, and those that are soon
needed again are kept. From the second step on DeepSpeed knows the order of all layers. It prefetches as far as
``stage3_prefetch_bucket_size`` and ``stage3_max_live_parameters`` allow. It keeps what recurs within
``stage3_max_reuse_distance`` elements, or was seen while it looked ahead.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from dsgpt.config.recipe_blocks import ZeroRecipe
from dsgpt.model.config import GPT2Config
from dsgpt.planner.setup import (
    EMBEDDING,
    FULL,
    ParameterSize,
    Setup,
    Shards,
    model_parameters,
    persistent,
    total,
    zero_piece,
)
from dsgpt.planner.strategy import (
    AFTER_STEP,
    BACKWARD,
    FORWARD,
    Copied,
    ModelState,
    Moment,
    Place,
    Traffic,
    embedding_bytes,
)
from dsgpt.planner.zero import DeepSpeed

Layer = tuple[ParameterSize, ...]
"""The parameters of a module itself, without those of its children."""

_NOTHING: Layer = ()
"""A module without parameters: a block, dropout. DeepSpeed prefetches there too."""


def gathered(setup: Setup) -> list[ParameterSize]:
    """The parameters that one micro batch gathers, each as often as it is gathered."""
    return list(_walk_of(setup).gathered)


def gathered_forward(setup: Setup) -> list[ParameterSize]:
    """Those of ``gathered`` that are gathered during the forward pass, prefetching for the backward pass included."""
    walk = _walk_of(setup)
    return walk.gathered[: walk.forward]


def most_gathered(setup: Setup) -> int:
    """The most elements of gathered parameters that are whole at a time, those that persist left out."""
    return _walk_of(setup).most_live


def _walk_of(setup: Setup) -> "_Walk":
    return _walk(setup.model, setup.recipe.zero_optimization, setup.activation_checkpointing)


@lru_cache(maxsize=16)
def _walk(model: GPT2Config, zero: ZeroRecipe, recompute: bool) -> "_Walk":
    """The walk, which is the same for every micro batch size and number of ranks."""
    return _Walk(model, zero, *_order(model, recompute=recompute))


def _order(model: GPT2Config, *, recompute: bool) -> tuple[list[Layer], list[Layer]]:
    """The modules of a forward and a backward pass, in the order in which they begin; the head is the embedding again.

    With activation checkpointing a block runs forward once more in its backward pass.
    """
    parts = {part.name: part for part in model_parameters(model)}
    head: Layer = (parts[EMBEDDING],)
    tail: Layer = (parts["ln_f.weight"], parts["ln_f.bias"])
    positions: Layer = (parts["wpe.weight"],)
    forward, backward = [_NOTHING, head, positions, _NOTHING], [_NOTHING, head, tail]
    for layer in range(model.n_layer):
        forward += _block(parts, layer)
    for layer in reversed(range(model.n_layer)):
        backward += _block_backward(parts, layer, recompute=recompute)
    return [*forward, tail, head], [*backward, _NOTHING, positions, head]


def _block(parts: dict[str, ParameterSize], layer: int) -> list[Layer]:
    ln_1, qkv, proj, ln_2, fc, back = _block_layers(parts, layer)
    return [_NOTHING, ln_1, _NOTHING, qkv, proj, _NOTHING, ln_2, _NOTHING, fc, back, _NOTHING]


def _block_backward(parts: dict[str, ParameterSize], layer: int, *, recompute: bool) -> list[Layer]:
    ln_1, qkv, proj, ln_2, fc, back = _block_layers(parts, layer)
    again = _block(parts, layer)[:-1] if recompute else []  # begins, and ends, when the last matrix needs its input
    return [_NOTHING, _NOTHING, _NOTHING, back, *again, fc, ln_2, _NOTHING, _NOTHING, proj, qkv, ln_1]


def _block_layers(parts: dict[str, ParameterSize], layer: int) -> list[Layer]:
    names = ("ln_1", "attn.qkv", "attn.proj", "ln_2", "mlp.fc", "mlp.proj")
    return [tuple(parts[f"blocks.{layer}.{name}.{kind}"] for kind in ("weight", "bias")) for name in names]


class _Walk:
    """One forward and backward pass."""

    def __init__(
        self, model: GPT2Config, zero: ZeroRecipe, forward: Sequence[Layer], backward: Sequence[Layer]
    ) -> None:
        order = self._order = [*forward, *backward]
        self._persistent = {part.name for part in persistent(zero, model_parameters(model))}
        self._zero = zero
        self._queue = deque((part, step) for step, layer in enumerate(order) for part in layer)
        self._seen: dict[str, int] = {}
        """The last use of each parameter that prefetching has passed."""
        self._available = set(self._persistent)
        self._live = self.most_live = 0
        self.gathered: list[ParameterSize] = []
        self.forward = 0
        """How many of ``gathered`` belong to the forward pass."""
        for step, layer in enumerate(order):
            self._use(step, layer)
            if step < len(forward):
                self.forward = len(self.gathered)

    def _use(self, step: int, layer: Layer) -> None:
        for part in layer:
            self._gather(part)
        ahead = {part.name for part in layer if self._seen.get(part.name, -1) < step}
        while ahead:
            part, use = self._queue.popleft()
            self._seen[part.name] = use
            ahead.discard(part.name)
        self._look_ahead()
        self._release(step, layer)

    def _gather(self, part: ParameterSize) -> None:
        if part.name not in self._available:
            self._available.add(part.name)
            self._live += part.numel
            self.most_live = max(self.most_live, self._live)
            self.gathered.append(part)

    def _look_ahead(self) -> None:
        room = min(self._zero.stage3_max_live_parameters - self._live, self._zero.stage3_prefetch_bucket_size)
        taken, wanted = 0, list[ParameterSize]()
        while self._queue and taken < room:
            part, use = self._queue.popleft()
            self._seen[part.name] = max(use, self._seen.get(part.name, use))
            if part.name not in self._available and part not in wanted:
                wanted.append(part)
                taken += part.numel
        for part in wanted:
            self._gather(part)

    def _release(self, step: int, layer: Layer) -> None:
        kept = self._persistent | {part.name for part in layer if self._seen.get(part.name, -1) > step + 1}
        passed = 0
        for later in self._order[step + 1 :]:
            if passed >= self._zero.stage3_max_reuse_distance:
                break
            kept |= {part.name for part in later}
            passed += sum(part.numel for part in later)
        for part in layer:
            if part.name not in kept:
                self._available.discard(part.name)
                self._live -= part.numel


_OPERATIONS_PER_PASS = 100
"""Operations for each parameter in each pass over the blocks: hooks look up, gather, wait for and release parameters in
Python. On a CPU nothing else runs."""


class Zero3(DeepSpeed):
    """Every rank has a piece of each parameter; weights are gathered for each layer."""

    def shards(self, rank: int) -> Shards:
        """The rank's pieces."""
        return Shards.of(self.setup, self.setup.held(rank))

    def pieces(self, parameters: Iterable[ParameterSize]) -> int:
        """Elements of a rank's pieces of ``parameters``."""
        return sum(zero_piece(part, self.setup.zero_ranks) for part in parameters)

    def persistent(self, rank: int) -> list[ParameterSize]:
        """Parameters that are held whole, too."""
        return persistent(self.setup.recipe.zero_optimization, self.setup.held(rank))

    def stepped_elements(self, rank: int) -> int:
        """Its pieces."""
        return self.shards(rank).own

    @property
    def reductions(self) -> int:
        """In every micro batch."""
        return self.setup.gradient_accumulation_steps

    @property
    def bucket_copies(self) -> int:
        """Into the bucket, 2w."""
        return 2 * self.setup.low * self.reductions

    def model_state(self, rank: int) -> ModelState:
        """wP/N of parameters, up to 8P/N of gradients, 4mP/N of moments, 4P/N of master weights.

        Parameters that persist are also held whole. There are two copies of the gradients. The optimizer steps on the
        second: one sub-group's at a time, or with offload all.
        With offload to NVMe, tensors that are large enough to be swapped are in files, which no measurement of memory
        sees.
        """
        shards, ranks, setup = self.shards(rank), self.setup.zero_ranks, self.setup
        whole = ranks * self.pieces(self.persistent(rank)) if ranks > 1 else 0  # one rank's pieces are the parameters
        second = shards.own if self.offloads else max(shards.sub_groups)
        sizes = {
            "parameters": setup.low * (shards.own + whole),
            "gradients": FULL * (shards.own + second),
            "optimizer": self.optimizer_state(shards.own, tensors=len(shards.sub_groups)),
            "master": FULL * shards.own,
        }
        stays = set() if self.offloads else {"gradients", "optimizer", "master"}
        stays |= {"parameters"} if setup.recipe.offload_param == "none" else set()
        return ModelState(**sizes, off_device={name: size for name, size in sizes.items() if name not in stays})

    def start_bytes(self, rank: int, device: str) -> int:  # noqa: ARG002 - of all strategies
        """The embedding, whole, in fp32 and in the precision of the run (``zero.Init``)."""
        return (FULL + self.setup.low) * self.setup.model.largest_parameter()

    @property
    def gathered_at_save(self) -> int:
        """The embedding, from an evaluation."""
        return embedding_bytes(self.setup)

    def moments(self, rank: int, device: str) -> list[Moment]:
        """Gathered weights, a flat buffer of this rank's gradients, the bucket; in the step a second copy of those.

        Weights that are gathered together stay in the buffer of their all-gather until the last of them has been used.
        So they exist twice during the forward pass, and the embedding once more if it has been freed. On a CPU those
        that are being gathered exist twice as well, because gloo copies them. A full bucket is reduced from a copy in
        the order of the ranks, and gloo makes one more.
        """
        setup, layers, embedding = self.setup, self.setup.model.n_layer, embedding_bytes(self.setup)
        shards, most = self.shards(rank), most_gathered(setup)
        sums, stepped = FULL * shards.own, FULL * (shards.own + max(shards.sub_groups))
        if self.offloads:  # both copies exist in the host all the time
            sums = stepped = 2 * sums if device == "cpu" else 0
        base = {"gradients": sums, "buckets": self.bucket_bytes(setup.low)}
        whole = setup.low * most
        together = setup.low * min(setup.recipe.zero_optimization.stage3_prefetch_bucket_size, most)
        freed = embedding if [part.name for part in gathered(setup)].count(EMBEDDING) > 1 else 0
        buffers = freed + (whole if device == "cpu" else together)
        copies = 2 if device == "cpu" else 1
        found = [
            Moment(name="forward", blocks=layers, parts=base | {"gathered": whole + buffers}),
            Moment(name="loss", blocks=layers, parts=base | {"gathered": whole}),
            Moment(name="backward", blocks=layers, parts=base | {"gathered": whole, "new_gradients": embedding}),
            Moment(name="step", parts=base | {"gradients": stepped}),
            Moment(name="evaluation", parts=base | {"gathered": whole}),
        ]
        for fill in self.bucket_fills(setup.held(rank)):
            buckets = base["buckets"] + copies * setup.low * fill.elements
            waits = 0 if fill.has_embedding else embedding
            parts = {"buckets": buckets, "new_gradients": waits, "gathered": min(whole, embedding)}
            found.append(Moment(name="reduction", blocks=fill.blocks, parts=base | parts))
        return found

    def zero_traffic(self, rank: int) -> list[Traffic]:
        """In every micro batch weights for the forward and the backward pass, and gradients; persistent ones once.

        About a x (2wP + wP) + w x what persists. Gradients are reduced each piece to its rank, or in a bucket by an
        all-reduce.
        """
        setup, zero = self.setup, self.setup.recipe.zero_optimization
        in_buckets = zero.contiguous_gradients and not zero.reduce_scatter
        limit = setup.reduce_bucket_size if in_buckets else 0
        alone = [part for part in setup.held(rank) if part.numel > limit]
        bucketed = total(part for part in setup.held(rank) if part.numel <= limit)
        reduced = {"reduce_scatter": setup.zero_ranks * self.pieces(alone), "all_reduce": bucketed}
        return [
            *self.gathers(rank),
            *(
                Traffic(
                    what="gradients",
                    operation=operation,
                    group_size=setup.zero_ranks,
                    payload_bytes=self.reductions * self.gradient_width * elements,
                    summed_width=self.gradient_width,
                )
                for operation, elements in reduced.items()
            ),
        ]

    def gathers(self, rank: int) -> list[Traffic]:
        """Of weights."""
        ranks = self.setup.zero_ranks
        elements = self.reductions * self.pieces(gathered(self.setup)) + self.pieces(self.persistent(rank))
        size = self.setup.low * ranks * elements
        return [Traffic(what="weights", operation="all_gather", group_size=ranks, payload_bytes=size)]

    def weight_places(self) -> dict[Place, int]:
        """Where they are gathered, and what persists after the step."""
        forward, backward = self._pieces_of_passes()
        return self.each_pass(forward, backward) | {(AFTER_STEP, None): self.pieces(self.persistent(0))}

    def _pieces_of_passes(self) -> tuple[int, int]:
        """Elements of a rank's pieces of what the forward pass gathers, and the backward pass."""
        forward = self.pieces(gathered_forward(self.setup))
        return forward, self.pieces(gathered(self.setup)) - forward

    def gradient_places(self) -> dict[Place, int]:
        """In every backward pass."""
        return self.each_pass(0, 1)

    def copied(self, rank: int) -> Iterator[Copied]:
        """The rank's pieces of weights before every gather, too."""
        yield from super().copied(rank)
        offload = self.setup.recipe.offload_param
        links = {"none": (), "cpu": ("host",), "nvme": ("files", "host")}[offload]
        pieces = dict(zip((FORWARD, BACKWARD), self._pieces_of_passes(), strict=True))
        for number in range(self.reductions):
            for moment, elements in pieces.items():
                for link in links:
                    size = self.setup.low * elements
                    yield Copied(
                        moment=moment, micro_batch=number, what="weights", link=link, to_device=True, size=size
                    )

    def summed_in_host(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """fp32 sums of the rank's part, which go to the device and back.

        Even the first one, which only replaces the sum, comes back (``partition_grads``).
        """
        whole = FULL * self.stepped_elements(rank)
        yield from ((number, whole, whole) for number in range(self.reductions))

    def hidden(self, traffic: Traffic, seconds: float, *, forward: float, backward: float) -> float:  # noqa: ARG002
        """Behind half of the computation."""
        layers = self.setup.model.n_layer
        return min(seconds * (layers / (layers + 1)), (forward + backward) * self.reductions / 2)

    def weight_calls(self) -> int:
        """Each gather has two parameters: weight and bias of a layer."""
        return self.reductions * len(gathered(self.setup)) // 2 + 1

    @property
    def hook_operations(self) -> int:
        """Of its hooks, in a micro batch."""
        return _OPERATIONS_PER_PASS * (3 if self.setup.activation_checkpointing else 2) * len(self.setup.held(0))

    def copied_around_reductions(self) -> float:
        """To the bucket, 2w; the own part added to its sum, (w + 8)/n."""
        low = self.setup.low
        each = 2 * low + (low + 2 * FULL) / self.setup.zero_ranks
        return self.reductions * each + self.divided_in_fp32()
