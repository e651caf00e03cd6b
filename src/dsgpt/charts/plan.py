"""The picture of a plan: who holds what on which rank, and how much of it."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dsgpt.charts.options import THEMES, current
from dsgpt.charts.style import FORMATS, frame, look, quiet_style
from dsgpt.common.files import write_atomic
from dsgpt.planner.memory import Peak, peak_memory
from dsgpt.planner.plan import GB, Plan, held_in_words, strategy_name

MOST_RANKS = 16
"""More ranks are not drawn: they hold the same as others."""
_LEAST_SHARE = 0.005
"""Of a bar: smaller parts are not drawn."""


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw the memory of every rank to ``path``, an SVG or PNG by its ending."""
    with quiet_style(THEMES["light"]):
        data = FORMATS[path.suffix.removeprefix(".")](_figure(plan))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def _figure(plan: Plan) -> Figure:
    setup = plan.setup
    ranks = range(min(setup.world_size, MOST_RANKS))
    peaks = [peak_memory(setup, rank=rank, device=plan.machine.kind) for rank in ranks]
    shown = _parts_to_show(peaks)
    more = f" (ranks 0 to {len(ranks) - 1} of {setup.world_size})" if setup.world_size > len(ranks) else ""
    picture = frame(
        f"Who holds what: {strategy_name(setup)} on {setup.world_size} x {plan.machine.name}{more}",
        warnings=[],
        captions=[
            f"Predicted peak of tensor memory of each rank, {setup.precision}, micro batch {setup.micro_batch_size}, "
            f"{setup.seq_length:,} tokens a sequence. The line is what tensors can fill of a device. Not measured."
        ],
        height=1.3 + 0.46 * len(ranks),
    )
    axes = picture.body.subplots()
    starts = [0.0] * len(ranks)
    for index, name in enumerate(shown):
        drawn = look(index, count=len(shown))
        sizes = [peak.parts[name] / GB for peak in peaks]
        bars = axes.barh(ranks, sizes, left=starts, color=drawn.colour, height=0.66, label=name.replace("_", " "))
        for bar in bars:
            bar.set(hatch=drawn.hatch, hatchcolor=drawn.hatch_colour, edgecolor=current().background, linewidth=0.6)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    for rank, (end, peak) in enumerate(zip(starts, peaks, strict=True)):
        axes.text(end, rank, f" {peak.total / GB:,.1f} GB, {peak.moment}", va="center", color=current().ink, fontsize=8)
    usable = plan.usable_bytes / GB
    axes.axvline(usable, color=current().ink, linewidth=1.2, linestyle=(0, (4, 2)))
    axes.text(usable, -0.75, f"{usable:,.1f} GB ", ha="right", va="center", color=current().quiet, fontsize=8)
    axes.set_yticks(list(ranks), [f"rank {rank}: {held_in_words(setup, rank)}" for rank in ranks])
    axes.set(xlabel="GB", xlim=(0, 1.2 * max([usable, *starts])), ylim=(len(ranks) - 0.5, -1.1))
    axes.grid(visible=False, axis="y")
    picture.body.legend(loc="outside lower center", ncols=min(6, len(shown)), frameon=False)
    return picture.figure


def _parts_to_show(peaks: Sequence[Peak]) -> list[str]:
    return [name for name in peaks[0].parts if any(peak.parts[name] > _LEAST_SHARE * peak.total for peak in peaks)]
