"""The configuration of one run, checked against the data and the machine.

Flags override the JSON; the JSON overrides the defaults. The global batch is split over ranks, micro batches and
accumulation steps; the ranks never change its size.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from dsgpt.common.command_line import require_flags
from dsgpt.common.errors import Problems
from dsgpt.common.text import counted, divisors, divisors_around, in_words, largest_divisor, multiples_around
from dsgpt.config import compatibility
from dsgpt.config.inputs import DEFAULT_MODEL_SIZE, Inputs, check_end_of_text, check_vocabulary, read_inputs
from dsgpt.config.options import Options, check_trackers
from dsgpt.config.recipe import PARALLEL_KEYS, Recipe
from dsgpt.data.data_set import DataSet, attended_length
from dsgpt.data.order import SampleOrder
from dsgpt.machine.topology import Topology
from dsgpt.model.config import GPT2Config

DEFAULT_STEPS_PER_PRINT = 10
DEFAULT_MICRO_BATCH_SIZE = 8
"""The default micro batch is the largest divisor of a rank's share that is at most this many sequences.

With 8 sequences of 1,024 tokens, GPT-2 124M fits in 16 GB.
"""
LARGEST_BATCH = 1 << 31
"""Sequences. No training needs more, and finding the divisors of a number up to this takes milliseconds."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """global_batch_size = micro_batch_size x gradient_accumulation_steps x data_parallel_size, in sequences."""

    global_batch_size: int
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int
    """Sequences per rank and forward pass."""
    gradient_accumulation_steps: int
    """Forward and backward passes per optimizer step."""
    data_parallel_size: int
    """Ranks that read different data."""


@dataclass(frozen=True, kw_only=True)
class LengthPlan:
    """The length of one run."""

    epochs: int
    """Passes over the training data; the last one may be incomplete."""
    total_steps: int
    """Optimizer steps of the whole run."""
    order: SampleOrder
    val_parts: tuple[range, ...]
    """Windows per validation, those of each source."""

    @property
    def val_windows(self) -> int:
        """Windows per validation."""
        return sum(map(len, self.val_parts))


@dataclass(frozen=True, kw_only=True)
class RunConfig(Inputs, LengthPlan):
    """One run, ready to be trained; what it decided takes precedence over ``options``."""

    recipe: Recipe
    model: GPT2Config
    train: DataSet
    val: DataSet
    seq_length: int
    batch: BatchPlan
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
        """Name of the strategy, one word: ``baseline``, ``fsdp``, ``zero2-offload``, ``tensor2-zero1`` ..."""
        return self.recipe.strategy_name(self.run_type)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether each block's activations are recomputed in the backward pass: by flag, or by the JSON's block."""
        return self.options.activation_checkpointing or self.recipe.activation_checkpointing is not None

    @property
    def end_of_text(self) -> int | None:
        """The id that begins a document in the data, with ``--mask_documents``; else None."""
        return self.train.files[0].sidecar.eot_id if self.options.mask_documents else None

    @cached_property
    def attended_length(self) -> float | None:
        """Tokens of a token's document in its window, the mean over some windows; None without ``--mask_documents``."""
        if self.end_of_text is None:
            return None
        return attended_length(self.train, self.order, seq_length=self.seq_length, end_of_text=self.end_of_text)

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
        UserError: with every mistake, a line each; or the published weights cannot be fetched, or do not fit the model.
    """
    from dsgpt.machine.device import slow_precision  # noqa: PLC0415 - torch takes seconds; --help should not

    notices: list[str] = []
    require_flags(options, problems)
    if options.resume and options.overwrite:
        problems.add("--resume continues the run in the folder, --overwrite deletes it: give one of them")
    if topology.is_main:
        check_trackers(options, problems)
    inputs = read_inputs(options, topology, problems)
    check_vocabulary(inputs, problems, notices)
    check_end_of_text(inputs, problems)
    request = compatibility.RunRequest(**vars(inputs), mistakes=problems.copy()) if inputs.recipe else None
    batch: BatchPlan | None = None
    allowed: tuple[str, ...] = ()
    if request is not None:
        request = replace(request, topology=training_ranks(request, problems, notices))
        compatibility.check_compatibility(request, problems)
        notices += compatibility.compatibility_notices(request)
        if batch := split_batch(request, problems, notices):
            allowed = compatibility.check_version(request, batch.gradient_accumulation_steps, problems, notices)
    length = _length(inputs, batch, problems=problems, notices=notices)
    problems.raise_if_any()
    assert request and length  # each is None only if a problem says why
    recipe, init_from = request.recipe, inputs.init_from
    if init_from and inputs.model and init_from.sha256 is None:
        init_from.weights(inputs.model, quiet=not topology.is_main)
    warm_up, steps = recipe.scheduler.warmup_num_steps if recipe.scheduler else 0, length.total_steps
    if steps <= warm_up:
        notices.append(f"the run ends at step {steps}, inside the {warm_up} warm-up steps of {recipe.path}")
    notices += filter(None, [slow_precision(inputs.precision, device=inputs.device)])
    resolved = {
        **{"topology": request.split_topology, "batch": batch, "notices": tuple(notices), "allowed_faults": allowed},
        "threads_per_device": options.threads_per_device or (1 if inputs.device == "cpu" else None),
        "steps_per_print": options.steps_per_print or recipe.steps_per_print or DEFAULT_STEPS_PER_PRINT,
    }
    return RunConfig(**vars(inputs) | vars(length) | resolved)


def training_ranks(request: compatibility.RunRequest, problems: Problems, notices: list[str]) -> Topology:
    """The ranks that train. Of an elastic launch these are the most that split the global batch; the rest are spares.

    Args:
        request: the run, with all ranks that were started.
        problems: receives a line if they would be on fewer machines than the launch allows.
        notices: receives a line about the numbers of ranks that the run may have.
    """
    topology, total = request.topology, request.options.global_batch_size or request.recipe.train_batch_size
    doubtful = request.is_doubtful("train_batch_size", *PARALLEL_KEYS)
    if topology.machines is None or doubtful or not total or total > LARGEST_BATCH:
        return topology
    (fewest, most), here, copy = topology.machines, topology.local_world_size, request.sizes.ranks_per_copy

    def most_of(ranks: int) -> int:
        return copy * largest_divisor(total, at_most=ranks // copy) if ranks >= copy else ranks

    used, enough = most_of(topology.world_size), (fewest - 1) * here + 1
    if used < enough:
        problems.add(
            f"global batch {total} uses {used} of {topology.world_size} ranks, which are on fewer than {fewest} "
            f"machines, and the launch asks for at least as many ({fewest}:{most}): take --global_batch_size "
            f"{multiples_around(total, topology.world_size // copy)}, or ask for fewer machines"
        )
    numbers = {used, *(most_of(machines * here) for machines in range(fewest, most + 1))}
    *more, least = sorted((number for number in numbers if number >= enough or number == used), reverse=True)
    spares = topology.world_size - used
    may_use, now = in_words(filter(None, [", ".join(map(str, more)), least])), f"now {used} train"
    notices.append(f"elastic: runs on {may_use} of its devices; {now} and {counted(spares, 'spare')} wait")
    return replace(topology, world_size=used, spares=spares, local_world_size=min(here, used))


def split_batch(request: compatibility.RunRequest, problems: Problems, notices: list[str]) -> BatchPlan | None:
    """The global batch over the ranks; ``problems`` and ``notices`` receive lines about it.

    A flag for the micro batch or for the accumulation drops the JSON's value of the other one. So a flag for one of
    them changes the split, and never the global batch.

    None if it cannot be split, if the model cannot be split over the ranks, or if a size in the recipe is wrong.
    """
    options, recipe = request.options, request.recipe
    uneven = request.topology.world_size % request.sizes.ranks_per_copy
    if uneven or request.is_doubtful("train_batch_size", *PARALLEL_KEYS):
        return None
    micro, steps = options.micro_batch_size_per_gpu, options.grad_accum_steps
    if micro is None and steps is None:
        micro, steps = recipe.train_micro_batch_size_per_gpu, recipe.gradient_accumulation_steps
        if options.exact:
            micro, steps = 1, None
    total = options.global_batch_size or recipe.train_batch_size
    ranks = 1 if options.run_type == "baseline" else request.split_topology.data_parallel_size
    keep = notices if options.enforce_global_batch_size or request.topology.machines is not None else None
    plan = plan_batch(total, micro, steps, ranks=ranks, problems=problems, keep=keep)
    if plan is not None and options.exact and plan.micro_batch_size > 1:
        cure = "leave --micro_batch_size_per_gpu and --grad_accum_steps out"
        problems.add(f"--exact computes one sequence at a time, not {plan.micro_batch_size}: {cure}")
    if plan is not None:
        compatibility.check_accumulation(request, plan.gradient_accumulation_steps, problems)
    return plan


def plan_batch(
    total: int | None, micro: int | None, steps: int | None, *, ranks: int, problems: Problems, keep: list[str] | None
) -> BatchPlan | None:
    """Compute all three sizes from those that are given.

    Args:
        total: sequences of the global batch.
        micro: sequences per rank and forward pass.
        steps: micro batches per optimizer step.
        ranks: that read different data.
        problems: receives a line about an impossible split, with the nearest valid values.
        keep: if the given split does not give the global batch, change the split instead of failing; this receives a
            line about the change. None to fail.

    Returns:
        The plan, or None if there is none.
    """
    if total is None:
        # DeepSpeed would multiply the other two by the ranks, so the training would depend on their number.
        here = f" ({micro * steps * ranks} is what the split gives on these ranks)" if micro and steps else ""
        problems.add(f"the global batch is not given: set train_batch_size in the JSON or --global_batch_size{here}")
        return None
    given = {"global batch": total, "micro batch": micro, "accumulation": steps}
    too_large = [f"{name} {value:,}" for name, value in given.items() if value is not None and value > LARGEST_BATCH]
    if too_large:
        problems.add(f"{' and '.join(too_large)} is too large: at most {LARGEST_BATCH:,}")
        return None
    if total % ranks:
        cure = f"take --global_batch_size {multiples_around(total, ranks)}, or {divisors_around(total, ranks)} ranks"
        problems.add(f"global batch {total} is not divisible by {ranks} ranks: {cure}")
        return None
    share = total // ranks
    if micro is None and steps is None:
        chosen = largest_divisor(share, at_most=DEFAULT_MICRO_BATCH_SIZE)
    else:
        chosen = micro or share // (steps or 1)
    if chosen * (steps or share // (chosen or 1)) != share:
        if keep is None:
            wanted = micro if micro is not None else max(1, round(share / (steps or 1)))
            closest = sorted(divisors(share), key=lambda d: (abs(d - wanted), d))[:2]
            nearest = " or ".join(f"micro batch {d} with accumulation {share // d}" for d in sorted(closest))
            asked = [f"micro batch {micro}"] * (micro is not None) + [f"accumulation {steps}"] * (steps is not None)
            split = f"{' x '.join(asked)} on {ranks} rank{'s' if ranks > 1 else ''}"
            cure = f"take {nearest}, or add --enforce_global_batch_size to let the program choose"
            problems.add(f"{split} does not give the global batch of {total}: {cure}")
            return None
        chosen = largest_divisor(share, at_most=micro or max(1, share // (steps or 1)))
        asked_for = f"micro batch {micro or 'unset'} and accumulation {steps or 'unset'}"
        keep.append(f"the global batch of {total} is kept: {asked_for} became {chosen} and {share // chosen}")
    steps = share // chosen
    return BatchPlan(
        global_batch_size=total, micro_batch_size=chosen, gradient_accumulation_steps=steps, data_parallel_size=ranks
    )


def _length(inputs: Inputs, batch: BatchPlan | None, *, problems: Problems, notices: list[str]) -> LengthPlan | None:
    """Compute the length of a run.

    Args:
        inputs: the flags, the data and the sequence length.
        batch: None if the global batch cannot be split.
        problems: receives a line about each file that is too short.
        notices: receives a line about windows that are dropped.

    Returns:
        The plan, or None if one of the above is missing or too short.
    """
    options, train, val, seq_length = inputs.options, inputs.train, inputs.val, inputs.seq_length
    if seq_length is None:
        return None
    for data in filter(None, (train, val)):
        for source, windows in zip(data.sources, data.windows(seq_length), strict=True):
            if not windows:
                fewer = f"fewer than one window of {seq_length} and its target: lower --seq_length or use more text"
                problems.add(f"{source.name}: its {source.tokens:,} tokens are {fewer}")
    if not (train and val and batch and all(train.windows(seq_length)) and all(val.windows(seq_length))):
        return None
    order = train.order(seq_length, global_batch_size=batch.global_batch_size, seed=options.seed)
    windows, per_epoch, size = order.windows, order.steps_per_epoch, batch.global_batch_size
    if windows < size:
        holds = f"holds {windows:,} windows of {seq_length} tokens, fewer than one global batch of {size}"
        problems.add(f"{train.path}: {holds}: lower --global_batch_size or --seq_length, or use more text")
        return None
    total = (options.epochs or 1) * per_epoch
    if options.max_train_steps:
        total = min(total, options.max_train_steps) if options.epochs else options.max_train_steps
    for source, own, part in zip(train.sources, train.windows(seq_length), train.parts, strict=True):
        epochs = total * size * part / sum(train.parts) / own
        if source.most_epochs is not None and epochs > source.most_epochs:
            read = f"{total:,} steps read {source.name} {epochs:.3g} times, and it allows {source.most_epochs:g} epochs"
            cure = f"take --max_train_steps {int(total * source.most_epochs / epochs)}, or give it a lower weight"
            problems.add(f"{train.path}: {read}: {cure}")
    if windows % size and len(train.sources) == 1:
        dropped = f"the last {windows % size} of its {windows:,} shuffled windows"
        notices.append(f"each epoch drops {dropped}: they do not fill a global batch")
    val_parts, first = list[range](), 0
    for own in val.windows(seq_length):
        most = options.max_val_steps * size if options.max_val_steps else own
        val_parts.append(range(first, first + min(own, most)))
        first += own
    return LengthPlan(epochs=-(-total // per_epoch), total_steps=total, order=order, val_parts=tuple(val_parts))
