"""Setups of rows in the form of ``measured.json``: setups that other programs trained, as setups of this one.

``plan.py --rows FILE --json`` answers them. A row says what was trained, on what, and how it was split; what was
measured is not read. docs/exam.md says how near the predictions are.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import Count, JsonError, clipped, parse_as, read_object
from dsgpt.config.recipe import recipe_from
from dsgpt.model.config import GPT2Config
from dsgpt.planner.hardware import find_gpu
from dsgpt.planner.rates import NETWORK_BYTES_PER_SEC, Machine, datasheet_machine
from dsgpt.planner.setup import Setup

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
    stage = row.zero_stage
    if stage is None:
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
        link = replace(gpu.interconnect, bytes_per_sec=int(row.link_override_gbs * 1e9))
        gpu = replace(gpu, interconnect=link)
    if given := re.search(r"([1-9][0-9]{0,4}) ?GB\b", row.hardware_true or ""):
        gpu = replace(gpu, memory_bytes=int(given[1]) * 10**9)
    if gbps is None and (own := NETWORKS.get(gpu.interconnect.kind)):
        gbps = own * row.gpus_per_node / 8
    network = NETWORK_BYTES_PER_SEC if gbps is None else gbps * 1e9 / 8
    fabric = "omni-path" if "omni-path" in (row.network or "").lower() else ""
    return datasheet_machine(gpu, devices=row.gpus_per_node, network=network, fabric=fabric, values=values)
