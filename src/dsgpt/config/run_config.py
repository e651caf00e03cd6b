"""The configuration of one run, checked against the data and the machine.

Flags override the JSON; the JSON overrides the defaults.
"""

from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.command_line import require_flags
from dsgpt.common.errors import Problems
from dsgpt.config.batch import BatchPlan, BatchRequest, LengthPlan, plan_batch, plan_length
from dsgpt.config.compatibility import RunRequest as Request
from dsgpt.config.compatibility import check_accumulation, check_compatibility, check_version, compatibility_notices
from dsgpt.config.inputs import DEFAULT_MODEL_SIZE, InitFrom, check_vocabulary, read_inputs
from dsgpt.config.options import Options, check_trackers
from dsgpt.config.recipe import PARALLEL_KEYS, Recipe
from dsgpt.data.order import SampleOrder
from dsgpt.data.token_file import TokenFile
from dsgpt.machine.topology import Topology
from dsgpt.model.config import GPT2Config

DEFAULT_STEPS_PER_PRINT = 10


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, ready to be trained."""

    options: Options
    """The flags as given. The fields below take precedence."""
    topology: Topology
    recipe: Recipe
    model: GPT2Config
    init_from: InitFrom | None
    """Where the initial weights come from; None for random ones."""
    batch: BatchPlan
    train: TokenFile
    val: TokenFile
    run_dir: Path
    seq_length: int
    """Tokens per sequence."""
    epochs: int
    """Passes over the training data; the last one may be incomplete."""
    total_steps: int
    """Optimizer steps of the whole run."""
    order: SampleOrder
    val_windows: int
    """Windows per validation."""
    precision: str
    """``fp32``, ``bf16`` or ``fp16``."""
    device: str
    """``cpu`` or ``cuda``."""
    threads_per_device: int | None
    """CPU threads per process; None leaves the choice to torch, as on GPUs."""
    steps_per_print: int
    notices: tuple[str, ...]
    """Lines for the user about decisions that no flag asked for."""
    allowed_faults: tuple[str, ...]
    """Threads of the known faults of the installed DeepSpeed that the user lets it train with."""

    @property
    def run_type(self) -> str:
        """``baseline``, ``ddp``, ``fsdp`` or ``optimized``."""
        return self.options.run_type or ""

    @property
    def model_size(self) -> str:
        """Name of the model's size: a preset, or the source of the initial weights."""
        return self.init_from.size_name if self.init_from else self.options.model_size or DEFAULT_MODEL_SIZE

    @property
    def strategy_name(self) -> str:
        """What executes the recipe, in one word: ``baseline``, ``fsdp``, ``zero2-offload``, ``tensor2-zero1`` ..."""
        if self.run_type != "optimized":
            return self.run_type
        sizes = self.topology.sizes
        split = {"pipeline": sizes.pipeline, "sequence": sizes.sequence, "tensor": sizes.tensor}
        devices = {self.recipe.offload_optimizer, self.recipe.offload_param}
        places = {"nvme": ["nvme"], "cpu": ["offload"]}
        place = next((places[device] for device in places if device in devices), [])
        names = [f"{name}{size}" for name, size in split.items() if size > 1]
        return "-".join([*names, f"zero{self.recipe.zero_stage}", *place])

    @property
    def activation_checkpointing(self) -> bool:
        """Whether each block's activations are recomputed in the backward pass: by flag, or by the JSON's block."""
        return self.options.activation_checkpointing or self.recipe.activation_checkpointing is not None

    @property
    def tokens_per_step(self) -> int:
        """Targets per optimizer step over all ranks."""
        return self.batch.global_batch_size * self.seq_length


def resolve(options: Options, *, topology: Topology, problems: Problems) -> RunConfig:
    """Read and check everything that ``options`` name, and decide what they leave open.

    First the inputs are read: recipe, data, initial weights, model and device. Then the checks that need several of
    them run, then the global batch is split over the ranks and the length of the run is counted. A step whose input is
    wrong is skipped, and a recipe with mistakes is used without its wrong entries, so that all mistakes are reported
    together.

    Args:
        options: the flags.
        topology: what the launcher announced.
        problems: the mistakes found so far, those of the command line.

    Raises:
        UserError: with every mistake, a line each.
    """
    notices: list[str] = []
    require_flags(options, problems)
    if options.resume and options.overwrite:
        problems.add("--resume continues the run in the folder, --overwrite deletes it: give one of them")
    if topology.is_main:
        check_trackers(options, problems)
    inputs = read_inputs(options, topology, problems)
    check_vocabulary(inputs, problems, notices)
    request = Request(**vars(inputs), mistakes=problems.copy()) if inputs.recipe else None
    batch: BatchPlan | None = None
    allowed: tuple[str, ...] = ()
    if request is not None:
        check_compatibility(request, problems)
        notices += compatibility_notices(request)
        if batch := split_batch(request, problems, notices):
            allowed = check_version(request, batch.gradient_accumulation_steps, problems, notices)
    length = plan_length(inputs, batch, problems=problems, notices=notices)
    problems.raise_if_any()
    assert request is not None  # each of these is None only if a problem says why
    assert batch is not None
    assert length is not None
    return _run_config(request, batch, length, notices, allowed)


def _run_config(
    request: Request, batch: BatchPlan, length: LengthPlan, notices: list[str], allowed: tuple[str, ...]
) -> RunConfig:
    """The run of ``request``, in which no mistake was found.

    Raises:
        UserError: the published weights cannot be fetched, or do not fit the model.
    """
    from dsgpt.machine.device import slow_precision  # noqa: PLC0415 - torch takes seconds; --help should not

    options, recipe, model, init_from = request.options, request.recipe, request.model, request.init_from
    assert model is not None
    assert request.train is not None
    assert request.val is not None
    assert request.seq_length is not None
    if init_from and init_from.sha256 is None:
        init_from.weights(model, quiet=not request.topology.is_main)
    warm_up = recipe.scheduler.warmup_num_steps if recipe.scheduler else 0
    if length.total_steps <= warm_up:
        notices.append(
            f"the run ends at step {length.total_steps}, inside the {warm_up} warm-up steps of {recipe.path}"
        )
    notices += filter(None, [slow_precision(request.precision, device=request.device)])
    return RunConfig(
        options=options,
        topology=request.split_topology,
        recipe=recipe,
        model=model,
        init_from=init_from,
        batch=batch,
        train=request.train,
        val=request.val,
        run_dir=request.run_dir,
        seq_length=request.seq_length,
        epochs=length.epochs,
        total_steps=length.total_steps,
        order=length.order,
        val_windows=length.val_windows,
        precision=request.precision,
        device=request.device,
        threads_per_device=options.threads_per_device or (1 if request.device == "cpu" else None),
        steps_per_print=options.steps_per_print or recipe.steps_per_print or DEFAULT_STEPS_PER_PRINT,
        notices=tuple(notices),
        allowed_faults=allowed,
    )


def split_batch(request: Request, problems: Problems, notices: list[str]) -> BatchPlan | None:
    """The global batch over the ranks; ``problems`` and ``notices`` receive lines about it.

    None if it cannot be split, if the model cannot be split over the ranks, or if a size in the recipe is wrong.
    """
    options, recipe = request.options, request.recipe
    if request.topology.world_size % request.sizes.ranks_per_copy:
        return None
    if request.is_doubtful("train_batch_size", *PARALLEL_KEYS):
        return None
    flags = BatchRequest(
        global_batch_size=options.global_batch_size,
        micro_batch_size=options.micro_batch_size_per_gpu,
        gradient_accumulation_steps=options.grad_accum_steps,
    )
    written = BatchRequest(
        global_batch_size=recipe.train_batch_size,
        micro_batch_size=recipe.train_micro_batch_size_per_gpu,
        gradient_accumulation_steps=recipe.gradient_accumulation_steps,
    )
    plan, changed = plan_batch(
        flags.over(written),
        data_parallel_size=1 if options.run_type == "baseline" else request.split_topology.data_parallel_size,
        enforce_global=options.enforce_global_batch_size,
        problems=problems,
    )
    if changed:
        notices.append(changed)
    if plan is not None:
        check_accumulation(request, plan.gradient_accumulation_steps, problems)
    return plan
