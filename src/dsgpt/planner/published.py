"""``docs/planner-published.md``: predictions from datasheets beside figures that other projects published."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.errors import Problems
from dsgpt.common.json_files import Positive, read_as
from dsgpt.config.recipe import read_recipe
from dsgpt.model.config import GPT2_VOCAB_SIZE, GPT2Config
from dsgpt.planner.hardware import find_gpu
from dsgpt.planner.rates import ATTENTION, LINK, MATRIX, MEMORY, Share, datasheet_machine
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import predict_step

TABLE = Path(__file__).with_name("published.json")


@dataclass(frozen=True, kw_only=True)
class PublishedShape:
    """The shape of a model."""

    n_layer: Positive
    n_head: Positive
    n_embd: Positive


@dataclass(frozen=True, kw_only=True)
class Published:
    """One figure, and the setup here that is most like the one that reached it."""

    program: str
    model: str
    shape: PublishedShape
    gpu: str
    gpus: Positive
    run_type: str
    recipe: str
    """A recipe of ``ds_configs``, without its batch."""
    precision: str
    seq_length: Positive
    micro_batch_size: Positive
    gradient_accumulation_steps: Positive
    tokens_per_sec_per_gpu: Positive
    published_as: str
    """What was published, from which the figure follows."""
    source: str
    why_outside: str | None
    """Why the figure is not within the predicted range; None if it is."""


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """The file."""

    rows: list[Published]


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Tokens per second of a GPU."""

    low: float
    likely: float
    high: float

    def contains(self, figure: float) -> bool:
        """Whether it is within the range."""
        return self.low <= figure <= self.high


def read_published() -> PublishedTable:
    """The table."""
    return read_as(TABLE, PublishedTable)


def predict(row: Published, *, repository: Path) -> Predicted:
    """What the planner says of the setup of ``row``."""
    problems = Problems()
    recipe = read_recipe(repository / "ds_configs" / f"{row.recipe}.json", problems)
    problems.raise_if_any()
    assert recipe is not None
    shape = vars(row.shape)
    model = GPT2Config(**shape, block_size=row.seq_length, vocab_size=GPT2_VOCAB_SIZE)
    setup = Setup(
        run_type=row.run_type,
        model=model,
        recipe=recipe,
        world_size=row.gpus,
        precision=row.precision,
        micro_batch_size=row.micro_batch_size,
        gradient_accumulation_steps=row.gradient_accumulation_steps,
        seq_length=row.seq_length,
    )
    step = predict_step(setup, datasheet_machine(find_gpu(row.gpu)))
    tokens = row.micro_batch_size * row.gradient_accumulation_steps * row.seq_length
    return Predicted(low=tokens / step.most, likely=tokens / step.seconds, high=tokens / step.least)


def published_page(*, repository: Path) -> str:
    """The page, as Markdown."""
    table = read_published()
    predicted = [predict(row, repository=repository) for row in table.rows]
    return "\n".join([*_head(), *_table(table, predicted), "", *_remarks(table, predicted), *_assumed(), ""])


def _head() -> Iterator[str]:
    yield from (
        "# The planner beside published figures",
        "",
        "`src/plan.py` predicts times on GPUs from datasheets and assumed shares of their peaks. **This project",
        "measured none of them: the machine of the committed records has no GPU.** Other programs published what",
        "they reached. They are not this program: llm.c is CUDA with fused kernels; llm-foundry and nanoGPT are",
        "PyTorch with their own attention, precision or compiler; GPT2-Optimization, of which this project is a",
        "successor, is DeepSpeed with attention in separate operations. A range that contains their figures makes",
        "the assumptions plausible. It does not prove them.",
        "",
        "Tokens per second of one GPU. The setup is the one here that is most like theirs, with micro batch x",
        "accumulation and tokens of a sequence.",
        "",
    )


def _table(table: PublishedTable, predicted: list[Predicted]) -> Iterator[str]:
    yield "| program, model | GPUs | setup here | predicted | likely | published | within |"
    yield "|---|---|---|---:|---:|---:|---|"
    for number, (row, found) in enumerate(zip(table.rows, predicted, strict=True), 1):
        strategy = row.recipe if row.run_type == "optimized" else row.run_type
        gpus = f"{row.gpus} x {row.gpu}"
        work = f"{row.micro_batch_size} x {row.gradient_accumulation_steps}, {row.seq_length:,}"
        figure = row.tokens_per_sec_per_gpu
        yield (
            f"| [{row.program}, {row.model}]({row.source}) | {gpus} | {strategy}, {row.precision}, {work} | "
            f"{found.low / 1e3:,.1f}k to {found.high / 1e3:,.1f}k | {found.likely / 1e3:,.1f}k | "
            f"{figure / 1e3:,.1f}k | {'yes' if found.contains(figure) else f'no: see row {number}'} |"
        )


def _remarks(table: PublishedTable, predicted: list[Predicted]) -> Iterator[str]:
    inside = sum(found.contains(row.tokens_per_sec_per_gpu) for row, found in zip(table.rows, predicted, strict=True))
    yield f"{inside} of {len(table.rows)} figures are within their range. Where the figures come from:"
    yield ""
    for number, row in enumerate(table.rows, 1):
        outside = "" if row.why_outside is None else f" **Outside the range:** {row.why_outside}"
        yield f"{number}. {row.program}, {row.model}, {row.gpus} x {row.gpu}: {row.published_as}.{outside}"
    yield ""


def _assumed() -> Iterator[str]:
    yield "## What is assumed"
    yield ""
    yield "| share of | at least | likely | at most |"
    yield "|---|---:|---:|---:|"
    shares: dict[str, Share] = {
        "dense matrix peak": MATRIX,
        "matrix peak, by attention": ATTENTION,
        "memory bandwidth": MEMORY,
        "link bandwidth": LINK,
    }
    for name, share in shares.items():
        yield f"| {name} | {share.least:.0%} | {share.likely:.0%} | {share.most:.0%} |"
    yield ""
    yield "`.venv/bin/python src/plan.py --calibrate` replaces them by measured rates of your machine: see"
    yield "[planning](planning.md)."
