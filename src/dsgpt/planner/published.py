"""Pages of the documentation with predictions from datasheets, beside figures that other projects published."""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import JsonError, Positive, read_as, read_object
from dsgpt.common.text import REPOSITORY, table
from dsgpt.config.recipe import sound_recipe
from dsgpt.model.config import GPT2_VOCAB_SIZE, GPT2Config
from dsgpt.planner.hardware import find_gpu
from dsgpt.planner.rates import ATTENTION, LINK, MATRIX, MEMORY, datasheet_machine
from dsgpt.planner.setup import WORK, Setup
from dsgpt.planner.step_time import predict_step

# ``--published``: tokens per second beside those that others published.

PUBLISHED = Path(__file__).with_name("published.json")


@dataclass(frozen=True, kw_only=True)
class TabledSetup:
    """A training of a table."""

    shape: dict[str, Positive]
    """Layers, heads and width; the vocabulary, if it is not GPT-2's."""
    gpu: str
    run_type: str
    recipe: str
    """A recipe of ``ds_configs``, without its batch."""
    precision: str
    seq_length: Positive
    micro_batch_size: Positive
    gradient_accumulation_steps: Positive
    kernels: str = "fused"
    attention: str = "flash"
    """As in ``Setup``."""

    @property
    def strategy(self) -> str:
        """The recipe, or the run type of plain PyTorch."""
        return self.recipe if self.run_type == "optimized" else self.run_type

    def tokens_per_sec(self, gpus: int, *, network: float | None = None) -> tuple[float, float, float]:
        """Tokens per second of one GPU: at least, likely and at most; ``network`` is as for ``datasheet_machine``."""
        setup = Setup(
            model=GPT2Config(**{"vocab_size": GPT2_VOCAB_SIZE} | self.shape, block_size=self.seq_length),
            recipe=sound_recipe(REPOSITORY / "ds_configs" / f"{self.recipe}.json"),
            world_size=gpus,
            **{name: getattr(self, name) for name in (*WORK, "kernels", "attention")},
        )
        step = predict_step(setup, datasheet_machine(find_gpu(self.gpu), network=network))
        tokens = self.micro_batch_size * self.gradient_accumulation_steps * self.seq_length
        return tokens / step.most, tokens / step.seconds, tokens / step.least


@dataclass(frozen=True, kw_only=True)
class Published(TabledSetup):
    """One figure, and the setup here that is most like the one that reached it."""

    program: str
    model: str
    gpus: Positive
    tokens_per_sec_per_gpu: Positive
    published_as: str
    """The published statement from which the figure follows."""
    source: str
    why_outside: str | None
    """Why the figure is not within the predicted range; None if it is."""


def published_page() -> str:
    """The page, as Markdown."""
    figures, remarks, inside = [], [], 0
    for number, row in enumerate(read_as(PUBLISHED, dict[str, list[Published]])["rows"], 1):
        (low, likely, high), figure = row.tokens_per_sec(row.gpus), row.tokens_per_sec_per_gpu
        gpus, within = f"{row.gpus} x {row.gpu}", low <= figure <= high
        work = f"{row.micro_batch_size} x {row.gradient_accumulation_steps}, {row.seq_length:,}"
        figures.append(
            f"| [{row.program}, {row.model}]({row.source}) | {gpus} | {row.strategy}, {row.precision}, {work} | "
            f"{low / 1e3:,.1f}k to {high / 1e3:,.1f}k | {likely / 1e3:,.1f}k | "
            f"{figure / 1e3:,.1f}k | {'yes' if within else f'no: see row {number}'} |\n"
        )
        outside = "" if row.why_outside is None else f" **Outside the range:** {row.why_outside}"
        remarks.append(f"{number}. {row.program}, {row.model}, {gpus}: {row.published_as}.{outside}\n")
        inside += within
    shares = {
        "dense matrix peak": MATRIX,
        "matrix peak, by attention": ATTENTION,
        "memory bandwidth": MEMORY,
        "link bandwidth": LINK,
    }
    assumed = [f"| {name} | {one.least:.0%} | {one.likely:.0%} | {one.most:.0%} |\n" for name, one in shares.items()]
    parts = {"figures": "".join(figures), "remarks": "".join(remarks), "shares": "".join(assumed)}
    return PUBLISHED.with_suffix(".txt").read_text(encoding="utf-8").format(inside=inside, rows=len(figures), **parts)


# ``--projections``: what follows for more GPUs than anybody measured here.

PROJECTIONS = Path(__file__).with_name("projections.json")
RECORDS = REPOSITORY / "checkpoint" / "reference" / "cpu-2-cores"
"""Records of ``benchmark.py plan`` and ``network``, with predictions of what was measured here."""
GPUS = (8, 64, 512, 1024)


@dataclass(frozen=True, kw_only=True)
class Projected(TabledSetup):
    """A training on every number of ``GPUS``."""

    model: str
    network_gbps: Positive
    """Network of a machine of eight GPUs."""
    global_batch_size: Positive | None
    """Sequences of a step, however many GPUs there are; None if every GPU takes the micro batches of the table."""

    def on(self, gpus: int) -> float:
        """Likely tokens per second of one of so many GPUs."""
        own = self
        if self.global_batch_size is not None:
            micro = min(self.micro_batch_size, self.global_batch_size // gpus)
            steps = self.global_batch_size // gpus // micro
            own = replace(self, micro_batch_size=micro, gradient_accumulation_steps=steps)
        return own.tokens_per_sec(gpus, network=self.network_gbps * 1e9 / 8)[1]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Published figures of a GPU in a larger cluster, and in a smaller one."""

    program: str
    gpus: tuple[Positive, Positive]
    """GPUs of the smaller and of the larger cluster."""
    figures: tuple[Positive, Positive]
    """Figures of a GPU of each, in any unit."""
    published_as: str
    source: str
    """The address."""
    date: str
    """Date of the measurement, or of its publication."""
    setup: Projected | None
    """The one here that is most like it; None if no formula here is."""


@dataclass(frozen=True, kw_only=True)
class Projections:
    """The tables of the page."""

    projected: list[Projected]
    scaling: list[Scaling]


def projections_page() -> str:
    """The page, as Markdown.

    Raises:
        UserError: a record that it quotes is missing: an installed package has none.
    """
    tables, rows, beside, remarks = read_as(PROJECTIONS, Projections), [], [], []
    for row in tables.projected:
        reached = [row.on(gpus) for gpus in GPUS]
        work = f"{row.micro_batch_size} x {row.gradient_accumulation_steps} a GPU"
        batch = work if row.global_batch_size is None else f"{row.global_batch_size:,} in all"
        figures = [f"{each / 1e3:,.1f}k, {each / reached[0]:.0%}" for each in reached]
        rows.append([row.model, row.strategy, batch, f"{row.network_gbps:,}", *figures])
    for number, one in enumerate(tables.scaling, 1):
        few, many = one.gpus
        share = None if one.setup is None else f"{one.setup.on(many) / one.setup.on(few):.1%}"
        published = f"{one.figures[1] / one.figures[0]:.1%}"
        beside.append([f"[{one.program}]({one.source})", f"{few:,} to {many:,}", published, share or "none", number])
        remarks.append(f"{number}. {one.program}, {one.date}: {one.published_as}.\n")
    try:
        plan, network = (read_object(RECORDS / name) for name in ("plan.json", "network.json"))
    except JsonError as error:
        raise UserError(f"--projections: quotes records of a clone of the repository: {error}") from error
    held_out = [cell["step_seconds"] for cell in plan["cells"] if cell["status"] == "done" and not cell["fit"]]
    steps = [abs(each["predicted"] / each["measured"] - 1) for each in held_out]
    shares = [abs(point["off"]) for point in network["points"]]
    parts = {
        "projected": table(["model", "strategy", "sequences", "Gbit/s", *(f"{gpus:,} GPUs" for gpus in GPUS)], rows),
        "scaling": table(["program", "GPUs", "published", "predicted", "row"], beside),
        "remarks": "".join(remarks),
        "steps": f"{len(steps)} steps: {median(steps):.0%} in the median, {max(steps):.0%} at most",
        "shares": f"{len(shares)} shares: {median(shares):.1%} of a step in the median, {max(shares):.1%} at most",
    }
    return PROJECTIONS.with_suffix(".txt").read_text(encoding="utf-8").format(**parts)
