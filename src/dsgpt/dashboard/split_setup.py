"""What the page "How it is split" explains: strategies of the shipped recipes, resolved as ``src/plan.py`` does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.advising.options import PlanOptions
from dsgpt.advising.plan import fullest_rank, usable_bytes
from dsgpt.advising.request import fixed_setup, read_request
from dsgpt.common.problems import Problems
from dsgpt.dashboard.holding import Block, Holding
from dsgpt.dashboard.step_line import LINKS, operation_name, waits
from dsgpt.planning.host_link import Copied, copied
from dsgpt.planning.peak_memory import Peak
from dsgpt.planning.setup import Setup
from dsgpt.planning.step_order import Placed, placed_traffic

RECIPES = Path("ds_configs")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A strategy that can be picked."""

    name: str
    run_type: str
    recipe: str
    """The file's name in ``ds_configs``."""


CHOICES = (
    Choice(name="DDP", run_type="ddp", recipe="zero0.json"),
    Choice(name="FSDP", run_type="fsdp", recipe="zero0.json"),
    Choice(name="ZeRO-0", run_type="optimized", recipe="zero0.json"),
    Choice(name="ZeRO-1", run_type="optimized", recipe="zero1.json"),
    Choice(name="ZeRO-2", run_type="optimized", recipe="zero2.json"),
    Choice(name="ZeRO-2, offload", run_type="optimized", recipe="zero2_offload.json"),
    Choice(name="ZeRO-3", run_type="optimized", recipe="zero3.json"),
    Choice(name="ZeRO-3, offload", run_type="optimized", recipe="zero3_offload.json"),
    Choice(name="ZeRO-3, NVMe", run_type="optimized", recipe="zero3_nvme.json"),
    Choice(name="ZeRO++", run_type="optimized", recipe="zeropp.json"),
    Choice(name="Tensor parallel", run_type="optimized", recipe="tensor.json"),
    Choice(name="Sequence parallel", run_type="optimized", recipe="sequence.json"),
    Choice(name="Pipeline parallel", run_type="optimized", recipe="pipeline.json"),
    Choice(name="3D: pipeline and tensor", run_type="optimized", recipe="3d.json"),
    Choice(name="One device", run_type="baseline", recipe="zero0.json"),
)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A setup, and how much of a device its fullest rank needs."""

    setup: Setup
    rank: int
    """That needs the most memory."""
    peak: Peak
    usable_bytes: int
    """Of a device, for tensors."""

    @property
    def fits(self) -> bool:
        """Whether its peak does."""
        return self.peak.total <= self.usable_bytes


def split_of(choice: Choice, *, repository: Path, **flags: Any) -> Split:
    """The strategy, resolved.

    Args:
        choice: the strategy.
        repository: has the recipes.
        flags: of ``src/plan.py``, by field of ``PlanOptions``.

    Raises:
        UserError: training would refuse it; every mistake, a line each.
    """
    path = repository / RECIPES / choice.recipe
    options = PlanOptions(deepspeed_config=path, run_type=choice.run_type, tokens=1.0, **flags)
    problems = Problems()
    request = read_request(options, problems, repository=repository)
    setup = fixed_setup(request, problems)
    rank, peak = fullest_rank(setup, request.machine.kind)
    return Split(setup=setup, rank=rank, peak=peak, usable_bytes=usable_bytes(request.machine))


def held_rows(held: Sequence[Holding]) -> list[dict[str, Any]]:
    """The figures of the picture of who holds what, a row for each block."""
    return [_held_row(each, block) for each in held for block in each.blocks]


def _held_row(each: Holding, block: Block) -> dict[str, Any]:
    return {
        "rank": each.rank,
        "holds": each.words,
        "kind": block.kind,
        "bytes": block.size,
        "without a split, bytes": block.whole,
        "share": block.size / block.whole,
        "where": block.place,
    }


def sent_rows(setup: Setup) -> list[dict[str, Any]]:
    """What a rank of each pipeline stage sends in a step, a row for each kind of operation at each place.

    Micro batches that send the same are one row.
    """
    return [row for rank in setup.first_ranks for row in _sent_rows(setup, rank)]


def copied_rows(setup: Setup) -> list[dict[str, Any]]:
    """What offload copies in a step, a row for each kind at each place."""
    rows: dict[tuple[Any, ...], list[Copied]] = {}
    for each in copied(setup):
        rows.setdefault((each.moment, each.what, each.link, each.to_device, each.size), []).append(each)
    return [
        {
            "when": same[0].moment if same[0].micro_batch is None else f"in the {same[0].moment} pass",
            "what": same[0].what,
            "between": LINKS[same[0].link, same[0].to_device],
            "times": len(same),
            "bytes": same[0].size,
            "bytes per step": sum(each.size for each in same),
        }
        for same in rows.values()
    ]


def _sent_rows(setup: Setup, rank: int) -> list[dict[str, Any]]:
    rows: dict[tuple[Any, ...], list[Placed]] = {}
    for each in placed_traffic(setup, rank=rank):
        traffic = each.traffic
        key = (each.moment, traffic.what, traffic.operation, traffic.axis, traffic.payload_bytes)
        rows.setdefault(key, []).append(each)
    return [
        {
            **({"stage": setup.stage(rank)} if setup.sizes.pipeline > 1 else {}),
            "when": same[0].moment if same[0].micro_batch is None else f"in the {same[0].moment} pass",
            "operation": operation_name(same[0].traffic),
            "among": f"{same[0].traffic.group_size} {same[0].traffic.axis} ranks",
            "times": len(same),
            "payload, bytes": same[0].traffic.payload_bytes,
            "payload per step, bytes": sum(each.traffic.payload_bytes for each in same),
            "sent by a rank per step, bytes": sum(each.traffic.ring_bytes for each in same),
            "meanwhile": waits(setup, same[0]),
        }
        for same in rows.values()
    ]
