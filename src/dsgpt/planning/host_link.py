"""What a rank copies between its device and its host, or its files, in one optimizer step, and where in the step."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsgpt.planning.flat_groups import flat_groups
from dsgpt.planning.gathering import gathered, gathered_forward
from dsgpt.planning.parameters import ParameterSize
from dsgpt.planning.passes import stepped_elements
from dsgpt.planning.setup import FULL, Setup
from dsgpt.planning.sharded import zero_piece
from dsgpt.planning.step_order import AFTER_STEP, BACKWARD, BEFORE_STEP, DURING_STEP, FORWARD, fsdp_gathers


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
    to_device: bool
    """Whether it goes towards the device; otherwise away from it."""
    size: int


def copied(setup: Setup, *, rank: int = 0) -> list[Copied]:
    """What offload makes ``rank`` copy; nothing without offload."""
    if setup.run_type == "fsdp":
        return list(_fsdp(setup, rank)) if setup.recipe.dsgpt.fsdp.cpu_offload else []
    if setup.run_type != "optimized" or setup.recipe.offload_optimizer == setup.recipe.offload_param == "none":
        return []
    return [each for each in (*_optimizer(setup, rank), *_parameters(setup)) if each.size]


def _fsdp(setup: Setup, rank: int) -> Iterator[Copied]:
    """The rank's shards to the device whenever weights are gathered, in fp32; gradients to the host once."""
    for (moment, number), elements in fsdp_gathers(setup).items():
        yield Copied(
            moment=moment, micro_batch=number, what="weights", link="host", to_device=True, size=FULL * elements
        )
    size, last = FULL * stepped_elements(setup, rank), setup.gradient_accumulation_steps - 1
    yield Copied(moment=BACKWARD, micro_batch=last, what="gradients", link="host", to_device=False, size=size)


def _optimizer(setup: Setup, rank: int) -> Iterator[Copied]:
    """Gradients to the host; new weights back; moments and master weights from files and back."""
    recipe, own = setup.recipe, stepped_elements(setup, rank)
    if recipe.offload_optimizer == "none":
        return
    last = setup.gradient_accumulation_steps - 1
    if recipe.zero_stage > 1:
        for number, out, back in _summed(setup, rank):
            for size, comes in ((back, True), (out, False)):
                yield Copied(
                    moment=BACKWARD, micro_batch=number, what="gradients", link="host", to_device=comes, size=size
                )
        yield Copied(moment=BACKWARD, micro_batch=last, what="gradients", link="host", to_device=False, size=FULL * own)
    else:
        yield Copied(
            moment=BEFORE_STEP, micro_batch=None, what="gradients", link="host", to_device=False, size=FULL * own
        )
    if recipe.offload_optimizer == "nvme":
        state = FULL * (1 + setup.moments) * own
        for comes in (True, False):
            yield Copied(
                moment=DURING_STEP, micro_batch=None, what="optimizer state", link="files", to_device=comes, size=state
            )
    if recipe.offload_param == "none":  # else they stay in the host until they are gathered
        size = setup.low * own
        yield Copied(moment=AFTER_STEP, micro_batch=None, what="weights", link="host", to_device=True, size=size)


def _summed(setup: Setup, rank: int) -> Iterator[tuple[int, int, int]]:
    """What adding up costs in each micro batch: its number, bytes to the host, and bytes back. Sums are in the host.

    * ZeRO-3: fp32 sums of the rank's part, which go to the device and back. Even the first one, which only replaces the
      sum, comes back (``partition_grads``).
    * ZeRO-2 in fp32 with several micro batches: whole parameters of which the rank has a part
      (``async_accumulate_grad_in_cpu_via_gpu``). In bf16 and fp16 it adds up on the device.
    """
    several = setup.gradient_accumulation_steps > 1
    if setup.recipe.zero_stage == 3:
        whole = FULL * stepped_elements(setup, rank)
    elif setup.precision == "fp32" and several:
        part = rank // setup.sizes.tensor % setup.zero_ranks
        whole = FULL * sum(group.touched(part) for group in flat_groups(setup.held(rank), setup.zero_ranks))
    else:
        return
    for number in range(setup.gradient_accumulation_steps):
        yield number, whole, whole if number or setup.recipe.zero_stage == 3 else 0


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
                yield Copied(moment=moment, micro_batch=number, what="weights", link=link, to_device=True, size=size)


def _of_passes(setup: Setup) -> tuple[list[ParameterSize], list[ParameterSize]]:
    """What the forward pass gathers, and what the backward pass does."""
    forward = gathered_forward(setup)
    return forward, gathered(setup)[len(forward) :]
