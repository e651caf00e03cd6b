"""Rows of steps that others measured: as setups of this program, as evidence beside a prediction, and as questions.

A row in the form of ``measured.json`` says what was trained, on what, and how it was split. ``plan.py --rows FILE
--json`` answers rows; what was measured is not read. docs/exam.md says how near the predictions are.
"""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

from pydantic import Field

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Count, JsonError, clipped, parse_as, parse_json, read_bytes, read_object
from dsgpt.config.recipe import recipe_from
from dsgpt.model.config import GPT2Config
from dsgpt.planner.formulas import FIXED_BYTES, HOST_SHARE, STEP, model_state, worst_peak
from dsgpt.planner.hardware import find_gpu, gpus
from dsgpt.planner.options import HEADROOM
from dsgpt.planner.rates import Machine, datasheet_machine, fitted
from dsgpt.planner.setup import Setup
from dsgpt.planner.step_time import likely_sec

# Rows as setups.

MEASURED = Path(__file__).with_name("measured.json")
_INDEXED = ("network", "recompute_stated", "hardware_true", "expressed_as", "noise", "software")
"""Columns of the file that are indices into its ``texts``."""
CODE = {"megatron": ("fused", "stored"), "flash": ("fused", "flash")} | dict.fromkeys(
    ("eager", "bert"), ("eager", "stored")
)
"""Class of a row -> kernels and attention of the program that was measured; ``Setup`` describes both."""
_UNPREDICTED = re.compile(r"\+\+|hybrid|hsdp|nvme|disk", re.IGNORECASE)
"""Zero++, sharding within nodes alone, and offload to files."""
_SEPARATE, _MEGATRON = "not DeepSpeed's kernels", "Megatron"
NETWORKS = {"NVLink 3": 1600.0, "NVLink 4": 3200.0, "NVLink 5": 3200.0}
"""Gbit/s between machines of eight such GPUs where a row states none: the InfiniBand of NVIDIA's DGX A100, H100 and
B200, by their datasheets. Others have the assumption of ``rates``, 100."""


Size = Annotated[int, Field(ge=1, le=10**9)]
Speed = Annotated[float, Field(ge=1e-3, le=1e6)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a row says about its training; ``measured.json`` has more."""

    id: str
    hardware: str
    """Key of the GPU in ``hardware.json``."""
    gpus: Annotated[int, Field(ge=1, le=65536)]
    gpus_per_node: Size
    dtype: str
    n_layer: Annotated[int, Field(ge=1, le=512)]
    n_embd: Size
    n_head: Size
    vocab: Size
    seq_len: Size
    micro_batch: Size
    grad_accum: Annotated[int, Field(ge=1, le=10**5)]
    tp: Size = 1
    pp: Size = 1
    dp: Size
    kind: str | None = None
    """``class`` of the file: which kernels and which attention were measured."""
    kernels: Literal["eager", "compiled", "fused"] | None = None
    attention: Literal["flash", "stored"] | None = None
    flash: bool | None = None
    recompute: bool = False
    recompute_stated: str | None = None
    """``selective``: see ``Setup.selective``."""
    hardware_true: str | None = None
    """The exact part in words, where ``hardware`` is only a near one; its memory counts."""
    strategy: str | None = None
    sharding: str | None = None
    zero_stage: Count | None = None
    offload: str | None = None
    mp_mode: str | None = None
    """``PURE``: gradients are reduced in bf16 under FSDP."""
    network_gbit: Speed | None = None
    """Gbit/s of a node."""
    network: str | None = None
    """The network in words."""
    software: str | None = None
    planner_vocab: Size | None = None
    checkpoints_in_cpu: bool | None = None
    link_override_gbs: Speed | None = None
    """GB/s between two GPUs of a node, where its links were switched off."""


def read_row(row: Mapping[str, Any]) -> Row:
    """A row, checked.

    Raises:
        UserError: a value is missing or impossible; one line.
    """
    given = {("kind" if key == "class" else key): value for key, value in row.items() if value is not None}
    try:
        return parse_as(json.dumps(given).encode(), Row, unknown_keys=True)
    except JsonError as error:
        raise UserError(str(error)) from error


@cache
def measured_rows() -> tuple[dict[str, Any], ...]:
    """The rows that others measured, each with its citation."""
    file = read_object(MEASURED)
    rows = []
    for values in file["rows"]:
        row = {name: value for name, value in zip(file["fields"], values, strict=True) if value is not None}
        row |= {name: file["texts"][row[name]] for name in _INDEXED if name in row}
        rows.append(row | {"citation": ": ".join(filter(None, file["citations"][row["citation"]]))})
    return tuple(rows)


def setup_of(row: Row) -> Setup:
    """The setup of ours that executes what the row's program did.

    Raises:
        UserError: none of our strategies could train it; one line.
    """
    if row.dtype not in {"fp32", "bf16", "fp16"}:
        raise UserError(f"dtype {row.dtype}: no strategy computes in it: take fp32, bf16 or fp16")
    if row.tp * row.pp * row.dp != row.gpus:
        raise UserError(f"tp {row.tp} x pp {row.pp} x dp {row.dp} are not the {row.gpus} gpus")
    if row.gpus > row.gpus_per_node and row.gpus % row.gpus_per_node:
        raise UserError(f"gpus {row.gpus}: are not whole nodes of {row.gpus_per_node}")
    run_type, stage = strategy_of_row(row)
    if run_type != "optimized" and row.tp * row.pp > 1:
        raise UserError(f"strategy {run_type}: is not combined with tensor or pipeline ranks")
    if row.n_head % row.tp:
        raise UserError(f"tp {row.tp}: does not divide {row.n_head} heads")
    if row.pp > 1 and stage > 1:
        raise UserError(f"zero_stage {stage}: does not go with a pipeline: take 0 or 1")
    if row.pp > row.n_layer + 2:
        raise UserError(f"pp {row.pp}: a pipeline needs a block for each stage, and there are {row.n_layer}")
    kernels, attention = code_of(row)
    shape = {name: getattr(row, name) for name in ("n_layer", "n_head", "n_embd")}
    try:
        return Setup(
            run_type=run_type,
            model=GPT2Config(block_size=row.seq_len, vocab_size=row.planner_vocab or row.vocab, **shape),
            recipe=recipe_from(_recipe(row, stage), Path(row.id)),
            world_size=row.gpus,
            precision=row.dtype,
            micro_batch_size=row.micro_batch,
            gradient_accumulation_steps=row.grad_accum,
            seq_length=row.seq_len,
            activation_checkpointing=row.recompute,
            selective="selective" in (row.recompute_stated or ""),
            kernels=kernels,
            attention=attention,
            accumulation="sharded",
            fused_adam=kernels != "eager",
            # as Megatron-LM 1.1.5 of DeepSpeedExamples does under ZeRO-3: --partition-activations
            checkpoints_kept=0 if row.checkpoints_in_cpu else 1 / row.tp if stage > 2 else 1,
        )
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error


def code_of(row: Row) -> tuple[str, str]:
    """Kernels and attention of the program of a row."""
    kernels, attention = CODE.get(row.kind or "", ("fused", "flash" if row.flash is not False else "stored"))
    software, own = row.software or "", row.kind == "bert"  # BERT's programs bring kernels of their own
    if kernels == "eager" and (row.tp > 1 or _MEGATRON in software or (own and _SEPARATE not in software)):
        kernels = "fused"  # Megatron's; no other code has tensor ranks
    return row.kernels or kernels, row.attention or attention


def strategy_of_row(row: Row) -> tuple[str, int]:
    """The run type of a row, and its ZeRO stage: as stated, or as its sharding says.

    Raises:
        UserError: there is no such stage, or no formula for it; one line.
    """
    sharding, strategy = row.sharding or "", row.strategy or ""
    for name in ("strategy", "sharding", "offload"):
        if _UNPREDICTED.search(text := getattr(row, name) or ""):
            raise UserError(f"{name} {clipped(text)}: no formula predicts it")
    if strategy == "baseline" and row.gpus > 1:
        raise UserError(f"strategy baseline: trains on one GPU, not on {row.gpus}: take ddp")
    if (stage := row.zero_stage) is None:
        stated = (re.search(r"zero\D*([0-9]+)$", text.lower()) for text in (strategy, sharding.split(" ")[0]))
        stage = next((int(found[1][:9]) for found in stated if found), 0)
    if stage > 3:
        raise UserError(f"zero_stage {stage}: must be 0 to 3")
    if sharding in {"FULL_SHARD", "SHARD_GRAD_OP"} and not stage:
        return "fsdp", 0
    if (run_type := "fsdp" if strategy.startswith("fsdp") else strategy) in {"baseline", "ddp", "fsdp"} and not stage:
        return run_type, 0
    if not strategy and not stage:
        if row.kind == "megatron":  # Megatron-DeepSpeed, whose examples shard the optimizer
            return "optimized", 1
        if row.tp * row.pp == 1:
            return ("ddp" if row.gpus > 1 else "baseline"), 0
    return "optimized", stage


def _recipe(row: Row, stage: int) -> dict[str, Any]:
    """The recipe: its learning rate decides nothing here.

    Megatron gives each stage as many blocks; if only the blocks with both embeddings can be shared out evenly, these
    count as blocks, as in BigScience's trainings.
    """
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": stage > 1}
    words = row.offload or "none"
    if stage and (words == "cpu" or "optimizer" in words):
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage == 3 and "param" in words:
        zero["offload_param"] = {"device": "cpu"}
    if row.pp > 1:
        zero |= {"contiguous_gradients": False, "reduce_bucket_size": 50_000_000}
    ends = "|^Embedding" if row.n_layer % row.pp and (row.n_layer + 2) % row.pp == 0 else ""
    sharded = {
        "reshard_after_forward": row.sharding != "SHARD_GRAD_OP",
        "reduce_dtype": "low" if row.mp_mode == "PURE" else "fp32",
        "cpu_offload": words != "none" and not stage,
    }
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "tensor_parallel": {"autotp_size": row.tp},
        "pipeline": {"stages": row.pp, "partition": f"type:StageBlock{ends}"},
        "dsgpt": {"fsdp": sharded},
    }


def machine_of(row: Row, values: Mapping[str, float] | None = None) -> Machine:
    """The machine of a row; its rates follow from ``values`` of the constants, or from the package's.

    Raises:
        UserError: the table has no such GPU; one line.
    """
    gpu, gbps = find_gpu(row.hardware), row.network_gbit
    if row.link_override_gbs:
        gpu = replace(gpu, interconnect=replace(gpu.interconnect, bytes_per_sec=int(row.link_override_gbs * 1e9)))
    if given := re.search(r"([1-9][0-9]{0,4}) ?GB\b", row.hardware_true or ""):
        gpu = replace(gpu, memory_bytes=int(given[1]) * 10**9)
    if gbps is None and (own := NETWORKS.get(gpu.interconnect.kind)):
        gbps = own * row.gpus_per_node / 8
    network = None if gbps is None else gbps * 1e9 / 8
    fabric = "omni-path" if "omni-path" in (row.network or "").lower() else ""
    return datasheet_machine(gpu, devices=row.gpus_per_node, network=network, fabric=fabric, values=values)


# How near predictions came to measured steps of setups like one: its 80% range, and a sentence beside a plan. The
# residuals of the rows that others measured are kept with the constants that were fitted to them. Those of the rows
# nearest to a setup say how far off its prediction may be. docs/exam.md shows how often the range holds, also for rows
# of a source that no constant was fitted to.

INSIDE = 0.8
"""Share of measured steps that a range is to contain."""
_LEAST = 0.03
"""Least half width of a range, as a logarithm: what a run differs from its repetition."""
REACH = 0.2
"""Distance at which the weight of a row has fallen to 1/e. Nearer rows say how wide a range is."""
_NEAREST = 8
"""Rows whose mean distance says how near the measured ones are."""
_LIKE = 0.6
"""Largest distance of a row that is like a setup."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What decides whether two setups are alike."""

    words: tuple[tuple[str, str], str, bool, str, bool]
    """Kernels and attention; family of the GPU; whether ranks split the model; FSDP, ZeRO-3 or neither; whether there
    are several machines."""
    sizes: tuple[int, int, int, int]
    """Width, tokens of a micro batch, GPUs, tensor ranks."""

    def distance(self, other: "Traits") -> float:
        """0 for alike: 1 for other kernels or attention, 0.7 for another GPU, a part for each doubling of a size."""
        unequal = zip((1.0, 0.7, 0.5, 0.3, 0.3), self.words, other.words, strict=True)
        doublings = zip((0.25, 0.12, 0.08, 0.15), self.sizes, other.sizes, strict=True)
        far = sum(weight for weight, one, two in unequal if one != two)
        return far + sum(weight * abs(math.log2(one / two)) for weight, one, two in doublings)


def traits_of(setup: Setup, *, gpu: str, devices: int) -> Traits:
    """The traits of ``setup`` on machines with so many GPUs of this key in the table."""
    stage = setup.recipe.zero_stage if setup.run_type == "optimized" else 0
    parallel, tokens = setup.sizes, setup.micro_batch_size * setup.seq_length
    split, far = parallel.tensor * parallel.pipeline > 1, setup.world_size > devices
    sharding = "zero3" if stage == 3 else "fsdp" if setup.run_type == "fsdp" else ""
    return Traits(
        words=((setup.kernels, setup.attention), gpus()[gpu].family, split, sharding, far),
        sizes=(setup.model.n_embd, tokens, setup.world_size, parallel.tensor),
    )


@dataclass(frozen=True, kw_only=True)
class Witness:
    """A measured row, and how its prediction differs."""

    id: str
    source: str
    traits: Traits
    ratio: float
    """Predicted seconds divided by measured ones."""
    left_out: float
    """The same with constants that were fitted without the rows of its source."""


def witnesses_of(residuals: Mapping[str, tuple[float, float]]) -> tuple[Witness, ...]:
    """The rows of ``residuals``, which has both ratios of each."""
    found = []
    for row in measured_rows():
        if pair := residuals.get(row["id"]):
            given = read_row(row)
            traits = traits_of(setup_of(given), gpu=given.hardware, devices=given.gpus_per_node)
            found.append(Witness(id=given.id, source=row["source"], traits=traits, ratio=pair[0], left_out=pair[1]))
    return tuple(found)


@cache
def witnesses() -> tuple[Witness, ...]:
    """The rows that the constants were fitted to."""
    return witnesses_of(fitted().residuals)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What measured rows say about a prediction."""

    low: float
    """Least measured time to expect, in units of the predicted one."""
    high: float
    near: bool
    """Whether rows like it were measured."""
    errors: tuple[float, ...]
    """Shares by which the predictions of the rows like it are off."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the range in units of the predicted time, and what the rows like it say."""
        return {"low": self.low, "high": self.high, "near": self.near, "rows": len(self.errors), "words": self.words}

    @property
    def words(self) -> str:
        """A sentence for people."""
        if not self.near:
            return "no measured row is near this setup"
        rows = f"{len(self.errors)} measured row{'s' * (len(self.errors) > 1)} like this one"
        return f"for {rows}: median error {median(self.errors):.0%}, worst {max(self.errors):.0%}"


def evidence_for(
    traits: Traits, among: Iterable[Witness] | None = None, *, growth: float | None = None, inside: float = INSIDE
) -> Evidence:
    """The 80% range of a setup with these traits, from the residuals of the rows nearest to it.

    A row weighs exp(-d / reach) at distance d. The range is between the weighted 10th and 90th percentiles, around the
    prediction. It grows with the distance of the nearest rows beyond this reach: what was not measured is known less
    well.

    Args:
        traits: of the setup.
        among: the rows; None for all.
        growth: by which the range grows, as a logarithm for each unit of distance; None for what was fitted.
        inside: share of steps that another range is to contain.
    """
    rows = sorted((traits.distance(each.traits), each.ratio) for each in (witnesses() if among is None else among))
    far = fmean(distance for distance, _ in rows[:_NEAREST])
    weighted = sorted((-math.log(ratio), math.exp(-(distance - rows[0][0]) / REACH)) for distance, ratio in rows)
    wider = (fitted().growth if growth is None else growth) * max(0.0, far - REACH)
    passed, whole = list(accumulate(weight for _, weight in weighted)), sum(weight for _, weight in weighted)
    places = (bisect_left(passed, share * whole) for share in ((1 - inside) / 2, (1 + inside) / 2))
    low, high = (weighted[min(place, len(weighted) - 1)][0] for place in places)
    return Evidence(
        low=math.exp(min(low, -_LEAST) - wider),
        high=math.exp(max(high, _LEAST) + wider),
        near=far <= _LIKE,
        errors=tuple(abs(ratio - 1) for distance, ratio in rows if distance <= _LIKE),
    )


# ``plan.py --rows FILE --json``: the time, the range and the memory of every row of a file.

HEADROOMS = {False: 4.0, True: HEADROOM}
"""Percent of a GPU's datasheet memory that no tensor of a row's program fills, by whether it keeps the results of
separate operations, which leave more pieces unused. Of 34.1 10^9 bytes, which a V100 of "32 GB" has, rows reserved up
to 32.3; of what they reserved, 7 to 9% were in no tensor where the GPU was full (bs-gpt2md-371 and 372)."""


def answers(path: Path) -> Iterator[dict[str, Any]]:
    """Yields for each row of the file its answer, or its id and an error.

    Raises:
        UserError: the file is no list of rows; one line.
    """
    try:
        rows = parse_json(read_bytes(path))
    except JsonError as error:
        raise UserError(f"--rows {path}: cannot be read ({error})") from error
    if not isinstance(rows, list):
        raise UserError(f"--rows {path}: must be a list of rows, in the form of src/dsgpt/planner/measured.json")
    for row in rows:
        yield answer(row)


def answer(row: Any) -> dict[str, Any]:
    """The answer to a row: seconds and GB (10^9 bytes), or an error."""
    if not isinstance(row, dict):
        return {"id": None, "error": "a row must be an object"}
    try:
        given = read_row(row)
        setup, machine = setup_of(given), machine_of(given)
        if given.dtype not in machine.precisions:
            raise UserError(f"dtype {given.dtype}: {machine.name} has no units for it")
        seconds, (memory, fits) = likely_sec(setup, machine), memory_of(setup, machine)
        evidence = evidence_for(traits_of(setup, gpu=machine.name, devices=machine.devices))
        return {
            **{"id": given.id, "seconds_per_step": seconds, "seconds_low": seconds * evidence.low},
            **{"seconds_high": seconds * evidence.high, "peak_memory_gb": memory / 1e9, "fits": fits},
        }
    except UserError as error:
        said = "; ".join(error.problems)
    except (ValueError, ArithmeticError) as error:  # of numbers that no training has
        said = f"cannot be predicted ({error})"
    return {"id": row.get("id"), "error": said}


def memory_of(setup: Setup, machine: Machine) -> tuple[int, bool]:
    """Bytes of tensors on the rank that needs most, in a step, and whether its GPU and its host have them."""
    rank, peak = worst_peak(setup, device=machine.kind, among=STEP)
    headroom = HEADROOMS[setup.kernels == "eager" and not setup.activation_checkpointing]
    usable = (1 - headroom / 100) * machine.memory_bytes - FIXED_BYTES[machine.kind]
    on_host = sum(model_state(setup, rank=rank).off_device.values())
    return peak.total, peak.total <= usable and on_host <= HOST_SHARE * machine.host_bytes
