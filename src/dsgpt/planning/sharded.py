"""How FSDP and ZeRO-3 shard parameters: each parameter by itself, into one piece per rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsgpt.config.recipe_zero import ZeroRecipe
from dsgpt.planning.parameters import ParameterSize, optimizer_groups
from dsgpt.planning.setup import Setup


def fsdp_piece(part: ParameterSize, ranks: int) -> int:
    """Elements of a rank's piece under FSDP, which shards rows evenly and pads short pieces."""
    return part.numel // part.shape[0] * -(-part.shape[0] // ranks)


def fsdp_elements(parameters: Iterable[ParameterSize], ranks: int) -> int:
    """Elements of a rank's pieces of all ``parameters``."""
    return sum(fsdp_piece(part, ranks) for part in parameters)


def zero_piece(part: ParameterSize, ranks: int) -> int:
    """Elements of a rank's piece under ZeRO-3: the flat parameter in equal pieces, the last one padded."""
    return -(-part.numel // ranks)


def persistent(zero: ZeroRecipe, parameters: Iterable[ParameterSize]) -> list[ParameterSize]:
    """Those of ``parameters`` that ZeRO-3 keeps whole on every rank, because they are small."""
    each, together = zero.stage3_param_persistence_threshold, zero.stage3_model_persistence_threshold
    found: list[ParameterSize] = []
    elements = 0
    for part in parameters:
        if part.numel <= each and elements + part.numel <= together:
            found.append(part)
            elements += part.numel
    return found


@dataclass(frozen=True, kw_only=True)
class Shards:
    """One rank's pieces under ZeRO-3."""

    sub_groups: tuple[int, ...]
    """Elements of each group of pieces that the optimizer steps on at a time."""

    @property
    def own(self) -> int:
        """Elements of all pieces."""
        return sum(self.sub_groups)

    @classmethod
    def of(cls, setup: Setup, parameters: Sequence[ParameterSize]) -> "Shards":
        """The pieces of ``parameters``. A sub-group ends as soon as it has ``sub_group_size`` elements."""
        limit, ranks, found = setup.recipe.zero_optimization.sub_group_size, setup.zero_ranks, list[int]()
        for group in filter(None, optimizer_groups(parameters)):
            elements = 0
            for part in group:
                elements += zero_piece(part, ranks)
                if elements >= limit:
                    found.append(elements)
                    elements = 0
            if elements:
                found.append(elements)
        return cls(sub_groups=tuple(found))
