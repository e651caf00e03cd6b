"""How often ZeRO-3 gathers each parameter, computed as DeepSpeed's ``PartitionedParameterCoordinator`` does.

A layer's parameters are gathered before its forward and its backward pass, and freed after each. Small ones persist,
and those that are soon needed again are kept. From the second step on DeepSpeed knows the order of all layers. It
prefetches as far as ``stage3_prefetch_bucket_size`` and ``stage3_max_live_parameters`` allow. It keeps what recurs
within ``stage3_max_reuse_distance`` elements, or was seen while it looked ahead.
"""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from dsgpt.config.recipe_zero import ZeroRecipe
from dsgpt.model.config import GPT2Config
from dsgpt.planning.parameters import EMBEDDING, ParameterSize, model_parameters
from dsgpt.planning.setup import Setup
from dsgpt.planning.sharded import persistent

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
