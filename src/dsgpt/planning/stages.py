"""Which pipeline stage gets which layers, computed as DeepSpeed's ``PipelineModule._partition_layers`` does."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from dsgpt.model.config import GPT2Config
from dsgpt.planning.parameters import EMBEDDING, ParameterSize, model_parameters, total


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the sequence that is split into stages."""

    kind: str
    """The name that patterns of ``pipeline.partition`` are matched with."""
    parameters: list[ParameterSize]


def pipeline_layers(model: GPT2Config) -> list[Layer]:
    """Embedding, positions, blocks, the last LayerNorm, and the embedding again as the head."""
    whole = model_parameters(model)

    def of(prefix: str) -> list[ParameterSize]:
        return [part for part in whole if part.name.startswith(f"{prefix}.")]

    return [
        Layer(kind="Embedding", parameters=of("wte")),
        Layer(kind="PositionEmbedding", parameters=of("wpe")),
        *(Layer(kind="StageBlock", parameters=of(f"blocks.{layer}")) for layer in range(model.n_layer)),
        Layer(kind="LayerNorm", parameters=of("ln_f")),
        Layer(kind="Embedding", parameters=of("wte")),
    ]


def stage_bounds(model: GPT2Config, *, stages: int, partition: str) -> list[int]:
    """The index in ``pipeline_layers`` at which each stage begins, and the number of layers.

    Args:
        model: the shape.
        stages: how many; at least 2.
        partition: ``parameters``, ``uniform``, or ``type:`` and a pattern.
    """
    layers = pipeline_layers(model)
    if partition.lower() == "uniform":
        return _even_bounds(len(layers), stages)
    if partition.lower() == "parameters":
        return _balanced_bounds([total(layer.parameters) for layer in layers], stages)
    pattern = re.compile(partition.split(":", 1)[1], re.IGNORECASE)
    return _balanced_bounds([int(pattern.search(layer.kind) is not None) for layer in layers], stages)


@lru_cache(maxsize=256)
def stage_parameters(model: GPT2Config, *, stages: int, partition: str) -> list[list[ParameterSize]]:
    """The parameters of every stage. The tied embedding comes first, as in ``PipelineModule``, and once per stage."""
    layers = pipeline_layers(model)
    bounds = stage_bounds(model, stages=stages, partition=partition)
    dealt = []
    for first, end in pairwise(bounds):
        held = {part.name: part for layer in layers[first:end] for part in layer.parameters}
        dealt.append(sorted(held.values(), key=lambda part: part.name != EMBEDDING))
    return dealt


def stages_with_embedding(dealt: Sequence[Sequence[ParameterSize]]) -> int:
    """The number of stages with a copy of the embedding, whose gradients are summed: the first and the last stage."""
    return sum(any(part.name == EMBEDDING for part in stage) for stage in dealt)


def _even_bounds(items: int, parts: int) -> list[int]:
    size, more = divmod(items, parts)
    return [part * size + min(part, more) for part in range(parts + 1)]


def _balanced_bounds(weights: Sequence[int], parts: int) -> list[int]:
    """The bounds with the least difference between the heaviest and the lightest part (``partition_balanced``).

    The dynamic programming is DeepSpeed's, so that ties are broken in the same way.
    """
    count, sums = len(weights), [0, *accumulate(weights)]
    heaviest = [[float("inf")] * (parts + 1) for _ in range(count + 1)]
    lightest = [[float("inf")] * (parts + 1) for _ in range(count + 1)]
    least = [[float("inf")] * (parts + 1) for _ in range(count + 1)]
    cut = [[0] * (parts + 1) for _ in range(count + 1)]
    heaviest[0][0] = least[0][0] = 0
    for items in range(1, count + 1):
        for used in range(1, min(items, parts) + 1):
            for before in range(items):
                high = max(heaviest[before][used - 1], sums[items] - sums[before])
                low = min(lightest[before][used - 1], sums[items] - sums[before])
                if least[items][used] >= high - low:
                    least[items][used], heaviest[items][used], lightest[items][used] = high - low, high, low
                    cut[items][used] = before
    bounds = [count]
    for used in range(parts, 0, -1):
        bounds.append(cut[bounds[-1]][used])
    return bounds[::-1]
