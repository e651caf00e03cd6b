"""The recipe: a DeepSpeed JSON that every strategy can execute. Reads, checks and writes recipes.

A recipe is read and checked in the same way for every strategy, so the same file works for the baseline on a
laptop and for DeepSpeed on a cluster. Imports neither torch nor DeepSpeed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from dsgpt.common.errors import Problems
from dsgpt.common.json_files import JsonError, clipped, parse_json, read_bytes
from dsgpt.common.text import IN_CHECKOUT, REPOSITORY
from dsgpt.config.options import EXECUTES, NAMES, PRINTS, SPLITS
from dsgpt.config.options import ChangesTraining as Changes
from dsgpt.config.options import ExecutionOnly as Only
from dsgpt.config.recipe_blocks import (
    IN_A_FILE,
    WITHOUT_UNKNOWN_KEYS,
    ActivationCheckpointing,
    AioRecipe,
    Bf16,
    Block,
    Flag,
    Fp16,
    LossScaling,
    Number,
    OptimizerRecipe,
    PipelineRecipe,
    Positive,
    SchedulerRecipe,
    TensorParallelRecipe,
    TorchStrategies,
    ZeroRecipe,
    mistakes_of,
    no_null,
)
from dsgpt.machine.topology import ParallelSizes

_MAX_BYTES = 1 << 20

DEEPSPEED_KEYS = (
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("wall_clock_breakdown", "memory_breakdown", "dump_state", "aio"),
)
"""Keys that only DeepSpeed's engine uses. Other strategies ignore them.

The engine gets them as given, with four exceptions: ``zero_allow_untested_optimizer`` is always true, values for
offload are adapted, ``overlap_comm`` is false if it is absent, and ``reduce_bucket_size`` is at most the model's size.

The keys change how a step is computed, not its result, with one exception: Zero++'s ``zero_quantized_weights`` and
``zero_quantized_gradients`` in ``zero_optimization`` round what ranks send, which changes the training.
"""

PARALLEL_KEYS = ("tensor_parallel", "pipeline", "sequence_parallel_size")
"""Keys that split the model or its sequences over ranks under DeepSpeed. Strategies configure DeepSpeed from them."""


@dataclass(frozen=True, kw_only=True)
class RecipeSettings(Block):
    """The contents of a recipe. A field has the name of DeepSpeed's key; its default applies if the key is absent."""

    REFUSED: ClassVar = {
        "amp": "use a bf16 or fp16 block",
        "torch_autocast": "use a bf16 or fp16 block, which has the same meaning under every strategy",
        "data_types": "gradients are always accumulated in fp32, so that strategies can be compared; leave it out",
        "gradient_allreduce_op": "a sum over ranks would make the gradient depend on their number; leave it out",
        "managed_gradient_accumulation": "accumulation follows gradient_accumulation_steps; leave it out",
        "sparse_gradients": "GPT-2's tied embedding has dense gradients; leave it out",
        "dataloader_drop_last": "the data order is the same under every strategy; leave it out",
        "elasticity": "DeepSpeed is removing it; resume with --resume instead",
        "compression_training": "DeepSpeed is removing it",
        "communication_data_type": "another type rounds the gradients differently; leave it out",
        **dict.fromkeys(("curriculum_learning", "data_efficiency"), "it changes which samples are seen; leave it out"),
        **dict.fromkeys(
            ("prescale_gradients", "gradient_predivide_factor"), "it rounds the gradients differently; leave it out"
        ),
        **dict.fromkeys(("comms_logger", "flops_profiler"), "this version does not implement it; leave it out"),
        "log_level": "this program decides what is printed; leave it out",
        "autotuning": "leave it out",
    }
    """Keys that would let strategies do different work, or that are not implemented here."""
    MISSING: ClassVar = {"optimizer": '; for example {"type": "AdamW", "params": {"lr": 0.0006}}'}

    train_batch_size: Annotated[Positive | None, Changes("global batch")] = None
    train_micro_batch_size_per_gpu: Annotated[Positive | None, SPLITS] = None
    gradient_accumulation_steps: Annotated[Positive | None, SPLITS] = None
    steps_per_print: Annotated[Positive | None, PRINTS] = None
    optimizer: OptimizerRecipe
    scheduler: Annotated[SchedulerRecipe | None, no_null] = None
    gradient_clipping: Annotated[Number, Changes("gradient clipping")] = 1.0
    """Largest global gradient norm; 0 for no clipping. The default is that of DeepSpeed since 0.19.3."""
    bf16: Annotated[Bf16 | None, no_null] = None
    fp16: Annotated[Fp16 | None, no_null] = None
    activation_checkpointing: Annotated[ActivationCheckpointing | None, no_null] = None
    dsgpt: TorchStrategies = TorchStrategies()
    zero_optimization: ZeroRecipe = ZeroRecipe()
    zero_allow_untested_optimizer: Annotated[Flag, Only("true in every run, whatever the recipe says")] = False
    zero_force_ds_cpu_optimizer: Annotated[Flag, Only("chooses whose code computes the same optimizer")] = True
    wall_clock_breakdown: Annotated[Flag, PRINTS] = False
    memory_breakdown: Annotated[Flag, PRINTS] = False
    dump_state: Annotated[Flag, PRINTS] = False
    aio: Annotated[AioRecipe | None, no_null] = None
    tensor_parallel: TensorParallelRecipe = TensorParallelRecipe()
    pipeline: PipelineRecipe = PipelineRecipe()
    sequence_parallel_size: Annotated[Positive, EXECUTES] = 1

    @field_validator("fp16")
    @classmethod
    def _one_precision(cls, fp16: Fp16 | None, info: ValidationInfo) -> Fp16 | None:
        bf16 = info.data.get("bf16")
        if fp16 and fp16.enabled and bf16 and bf16.enabled:
            raise ValueError("and bf16 are both enabled; keep one")
        return fp16

    @field_validator("aio")
    @classmethod
    def _swaps_files(cls, aio: AioRecipe | None, info: ValidationInfo) -> AioRecipe | None:
        zero = info.data.get("zero_optimization")
        if aio and zero and "nvme" not in {zero.offload_optimizer.device, zero.offload_param.device}:
            raise ValueError("has no effect without offload to nvme: leave it out")
        return aio

    @property
    def precision(self) -> str | None:
        """``fp32``, ``bf16``, ``fp16``, or None if the file does not set it."""
        blocks = {"bf16": self.bf16, "fp16": self.fp16}
        enabled = [name for name, block in blocks.items() if block and block.enabled]
        return enabled[0] if enabled else ("fp32" if any(blocks.values()) else None)

    @property
    def loss_scaling(self) -> LossScaling:
        """The settings of the ``fp16`` block, or their defaults."""
        rules = asdict(self.fp16 or Fp16())
        del rules["enabled"]
        return LossScaling(**rules)

    @property
    def parallel(self) -> ParallelSizes:
        """How the JSON splits the model."""
        tensor, pipeline = self.tensor_parallel.autotp_size, self.pipeline.stages
        return ParallelSizes(tensor=tensor, pipeline=pipeline, sequence=self.sequence_parallel_size)

    def parallel_of(self, run_type: str) -> ParallelSizes:
        """How a run of ``run_type`` splits the model: as the JSON says for ``optimized``, not at all for others."""
        return self.parallel if run_type == "optimized" else ParallelSizes()

    def strategy_name(self, run_type: str) -> str:
        """What executes it, in one word: ``baseline``, ``fsdp``, ``zero2-offload``, ``tensor2-zero1`` ..."""
        if run_type != "optimized":
            return run_type
        split = {name: getattr(self.parallel, name) for name in ("pipeline", "sequence", "tensor")}
        devices = {self.offload_optimizer, self.offload_param}
        place = ["nvme"] if "nvme" in devices else ["offload"] if "cpu" in devices else []
        names = [f"{name}{size}" for name, size in split.items() if size > 1]
        return "-".join([*names, f"zero{self.zero_stage}", *place])

    @property
    def zero_stage(self) -> int:
        """0 to 3."""
        return self.zero_optimization.stage

    @property
    def offload_optimizer(self) -> str:
        """``none``, ``cpu`` or ``nvme``."""
        return self.zero_optimization.offload_optimizer.device

    @property
    def offload_param(self) -> str:
        """``none``, ``cpu`` or ``nvme``."""
        return self.zero_optimization.offload_param.device

    @property
    def offloads(self) -> bool:
        """Whether optimizer or parameters are kept off the device."""
        return (self.offload_optimizer, self.offload_param) != ("none", "none")

    @property
    def nvme_blocks(self) -> tuple[str, ...]:
        """The blocks of ``zero_optimization`` that offload to nvme."""
        return tuple(name for name in ("offload_optimizer", "offload_param") if getattr(self, name) == "nvme")

    @property
    def zero_plus_plus(self) -> bool:
        """Whether Zero++ changes how stage 3 moves parameters or gradients."""
        zero = self.zero_optimization
        return zero.zero_hpz_partition_size > 1 or zero.zero_quantized_weights or zero.zero_quantized_gradients

    @property
    def uses_deepspeed_adam(self) -> bool:
        """Whether DeepSpeed's CPU Adam updates the weights (offload only). A C++ compiler builds it at first use."""
        return self.offload_optimizer != "none" and self.optimizer.type == "AdamW" and not self.optimizer.torch_adam


_SETTINGS = TypeAdapter(RecipeSettings)


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeSettings):
    """A checked recipe file."""

    path: Annotated[Path, NAMES]
    sha256: Annotated[str, NAMES]
    raw: Annotated[dict[str, Any], Only("the JSON as given; its keys are judged one by one")] = field(repr=False)
    """The JSON as given."""

    @property
    def deepspeed_only(self) -> tuple[str, ...]:
        """Keys in the file that only DeepSpeed uses."""
        return tuple(key for key in self.raw if key in DEEPSPEED_KEYS + PARALLEL_KEYS)


def sound_recipe(path: Path) -> Recipe:
    """The recipe in a file without mistakes.

    Raises:
        UserError: it has some; a line each.
    """
    problems = Problems()
    recipe = read_recipe(path, problems)
    problems.raise_if_any()
    assert recipe is not None
    return recipe


def read_recipe(path: Path, problems: Problems) -> Recipe | None:
    """Read and check a whole recipe.

    Mistakes go to ``problems``. The recipe without the wrong entries is returned nevertheless, so that the other checks
    can run; None if what is left is not a recipe. An installed package finds ``ds_configs/NAME.json`` among its files.
    """
    shipped = not IN_CHECKOUT and path.parts[:1] == ("ds_configs",) and not path.exists()
    try:
        data = read_bytes(REPOSITORY / path if shipped else path, max_bytes=_MAX_BYTES)
    except JsonError as error:
        problems.add(f"--deepspeed_config {path}: cannot be read ({error}); recipes are in ds_configs/")
        return None
    try:
        raw = parse_json(data)
    except JsonError as error:
        problems.add(f"--deepspeed_config {path}: is not valid JSON: {error}")
        return None
    if not isinstance(raw, dict):
        problems.add(f"--deepspeed_config {path}: must be an object in braces, not {clipped(raw)}")
        return None
    for context in (IN_A_FILE, WITHOUT_UNKNOWN_KEYS):  # unknown keys alone make a block invalid
        try:
            settings = _SETTINGS.validate_python(raw, context=context)
        except ValidationError as error:
            lines = (f"{': '.join(map(str, (path, *each.place)))} {each.text}" for each in mistakes_of(error))
            problems.add(*lines)  # once, also those that both contexts have
            settings = None
    while settings is None:
        try:
            settings = _SETTINGS.validate_python(raw, context=WITHOUT_UNKNOWN_KEYS)
        except ValidationError as error:
            removed = [_remove(raw, each.place) for each in mistakes_of(error)]
            if not any(removed):  # a required key is missing
                return None
    return Recipe(path=path, sha256=hashlib.sha256(data).hexdigest(), raw=raw, **vars(settings))


def recipe_from(raw: dict[str, Any], path: Path) -> Recipe:
    """The recipe that ``raw``, which this program made, would be in the file ``path``."""
    data = recipe_text(raw).encode()
    settings = _SETTINGS.validate_python(raw, context=IN_A_FILE)
    return Recipe(path=path, sha256=hashlib.sha256(data).hexdigest(), raw=raw, **vars(settings))


def recipe_text(raw: dict[str, Any]) -> str:
    """The text of a recipe file."""
    return json.dumps(raw, indent=2) + "\n"


def _remove(block: dict[str, Any], place: tuple[int | str, ...]) -> bool:
    """Remove the entry at ``place``, or else the innermost block around it that exists; False if none does."""
    key, *rest = place
    if key not in block:
        return False
    if not (rest and isinstance(block[key], dict) and _remove(block[key], tuple(rest))):
        del block[key]
    return True


def merged(recipe: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``recipe`` with ``changes`` laid over it, object by object; None removes a key."""
    result = dict(recipe)
    for key, value in changes.items():
        below = result.get(key)
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
