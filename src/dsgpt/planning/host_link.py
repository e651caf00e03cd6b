"""What a rank copies between its device and its host, or its files, in one optimizer step, and where in the step."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsgpt.planning.gathering import gathered, gathered_forward
from dsgpt.planning.parameters import ParameterSize
from dsgpt.planning.passes import stepped_elements
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.sharded import zero_piece
from dsgpt.planning.step_order import AFTER_STEP, BACKWARD, BEFORE_STEP, DURING_STEP, FORWARD


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Bytes that are copied at one place of the step."""

    moment: str
    """As ``step_order.Placed`` has it, or ``during the step``."""
    micro_batch: int | None
    what: str
    """``gradients``, ``weights`` or ``optimizer state``."""
    link: str
    """``host``, or ``files`` of the host."""
    size: int


def copied(setup: Setup, *, rank: int = 0) -> list[Copied]:
    """What offload makes ``rank`` copy; nothing without offload."""
    if setup.run_type == "fsdp":
        return list(_fsdp(setup, rank)) if setup.recipe.dsgpt.fsdp.cpu_offload else []
    if setup.run_type != "optimized" or setup.recipe.offload_optimizer == setup.recipe.offload_param == "none":
        return []
    return [*_optimizer(setup, rank), *_parameters(setup)]


def _fsdp(setup: Setup, rank: int) -> Iterator[Copied]:
    """Weights to the device for every pass, gradients to the host once."""
    size, last = FULL * stepped_elements(setup, rank), setup.gradient_accumulation_steps - 1
    for number in range(setup.gradient_accumulation_steps):
        for moment in (FORWARD, BACKWARD):
            yield Copied(moment=moment, micro_batch=number, what="weights", link="host", size=size)
    yield Copied(moment=BACKWARD, micro_batch=last, what="gradients", link="host", size=size)


def _optimizer(setup: Setup, rank: int) -> Iterator[Copied]:
    """Gradients to the host, at stage 1 once; new weights back; moments and master weights from files and back."""
    recipe, own = setup.recipe, stepped_elements(setup, rank)
    if recipe.offload_optimizer == "none":
        return
    size, kind = setup.low * own, {"what": "gradients", "link": "host"}
    if recipe.zero_stage > 1:
        for number in range(setup.gradient_accumulation_steps):
            yield Copied(moment=BACKWARD, micro_batch=number, size=size, **kind)
    else:
        yield Copied(moment=BEFORE_STEP, micro_batch=None, size=size, **kind)
    if recipe.offload_optimizer == "nvme":
        state = 2 * FULL * (1 + setup.moments) * own
        yield Copied(moment=DURING_STEP, micro_batch=None, what="optimizer state", link="files", size=state)
    yield Copied(moment=AFTER_STEP, micro_batch=None, what="weights", link="host", size=size)


def _parameters(setup: Setup) -> Iterator[Copied]:
    """The rank's pieces of weights before every gather."""
    recipe = setup.recipe
    if recipe.offload_param == "none":
        return
    pieces = [sum(zero_piece(part, setup.zero_ranks) for part in parts) for parts in _of_passes(setup)]
    links = ("files", "host") if recipe.offload_param == "nvme" else ("host",)
    for number in range(setup.gradient_accumulation_steps):
        for moment, elements in zip((FORWARD, BACKWARD), pieces, strict=True):
            for link in links:
                size = setup.low * elements
                yield Copied(moment=moment, micro_batch=number, what="weights", link=link, size=size)


def _of_passes(setup: Setup) -> tuple[list[ParameterSize], list[ParameterSize]]:
    """What the forward pass gathers, and what the backward pass does."""
    forward = gathered_forward(setup)
    return forward, gathered(setup)[len(forward) :]
