"""``docs/planner-published.md``: predictions from datasheets beside figures that other projects published."""

from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.errors import Problems
from dsgpt.common.json_files import Positive, read_as
from dsgpt.config.recipe import read_recipe
from dsgpt.model.config import GPT2_VOCAB_SIZE, GPT2Config
from dsgpt.planner.hardware import find_gpu
from dsgpt.planner.rates import ATTENTION, LINK, MATRIX, MEMORY, datasheet_machine
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import predict_step

TABLE = Path(__file__).with_name("published.json")


@dataclass(frozen=True, kw_only=True)
class Published:
    """One figure, and the setup here that is most like the one that reached it."""

    program: str
    model: str
    shape: dict[str, Positive]
    """Layers, heads and width."""
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
class Predicted:
    """Tokens per second of a GPU."""

    low: float
    likely: float
    high: float

    def contains(self, figure: float) -> bool:
        """Whether it is within the range."""
        return self.low <= figure <= self.high


def read_published() -> list[Published]:
    """The table."""
    return read_as(TABLE, dict[str, list[Published]])["rows"]


def predict(row: Published, *, repository: Path) -> Predicted:
    """What the planner says of the setup of ``row``."""
    problems = Problems()
    recipe = read_recipe(repository / "ds_configs" / f"{row.recipe}.json", problems)
    problems.raise_if_any()
    assert recipe is not None
    model = GPT2Config(**row.shape, block_size=row.seq_length, vocab_size=GPT2_VOCAB_SIZE)
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


_HEAD = """# The planner beside published figures

`src/plan.py` predicts times on GPUs from datasheets and assumed shares of their peaks. **This project
measured none of them: the machine of the committed records has no GPU.** Other programs published what
they reached. They are not this program: llm.c is CUDA with fused kernels; llm-foundry and nanoGPT are
PyTorch with their own attention, precision or compiler; GPT2-Optimization, of which this project is a
successor, is DeepSpeed with attention in separate operations. A range that contains their figures makes
the assumptions plausible. It does not prove them.

Tokens per second of one GPU. The setup is the one here that is most like theirs, with micro batch x
accumulation and tokens of a sequence.

| program, model | GPUs | setup here | predicted | likely | published | within |
|---|---|---|---:|---:|---:|---|
"""
_ASSUMED = """
## What is assumed

| share of | at least | likely | at most |
|---|---:|---:|---:|
"""
_END = """
`.venv/bin/python src/plan.py --calibrate` replaces them by measured rates of your machine: see
[planning](planning.md).
"""


def published_page(*, repository: Path) -> str:
    """The page, as Markdown."""
    figures, remarks, inside = [], [], 0
    for number, row in enumerate(read_published(), 1):
        predicted, figure = predict(row, repository=repository), row.tokens_per_sec_per_gpu
        strategy = row.recipe if row.run_type == "optimized" else row.run_type
        gpus, within = f"{row.gpus} x {row.gpu}", predicted.contains(figure)
        work = f"{row.micro_batch_size} x {row.gradient_accumulation_steps}, {row.seq_length:,}"
        figures.append(
            f"| [{row.program}, {row.model}]({row.source}) | {gpus} | {strategy}, {row.precision}, {work} | "
            f"{predicted.low / 1e3:,.1f}k to {predicted.high / 1e3:,.1f}k | {predicted.likely / 1e3:,.1f}k | "
            f"{figure / 1e3:,.1f}k | {'yes' if within else f'no: see row {number}'} |\n"
        )
        outside = "" if row.why_outside is None else f" **Outside the range:** {row.why_outside}"
        remarks.append(f"{number}. {row.program}, {row.model}, {gpus}: {row.published_as}.{outside}\n")
        inside += within
    within_range = f"\n{inside} of {len(figures)} figures are within their range. Where the figures come from:\n\n"
    shares = {
        "dense matrix peak": MATRIX,
        "matrix peak, by attention": ATTENTION,
        "memory bandwidth": MEMORY,
        "link bandwidth": LINK,
    }
    assumed = [
        f"| {name} | {each.least:.0%} | {each.likely:.0%} | {each.most:.0%} |\n" for name, each in shares.items()
    ]
    return "".join([_HEAD, *figures, within_range, *remarks, _ASSUMED, *assumed, _END])
