"""Reads the flags of ``src/plan.py``: the training that is planned, the candidates of a search, and measured steps."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from dsgpt.common.errors import Problems, UserError
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import BUSY_FROM, REPOSITORY, counted, divisors, divisors_around, multiples_around
from dsgpt.config.compatibility import RunRequest, check_split
from dsgpt.config.options import RUN_TYPES, Options, parse_arguments, shape_overrides
from dsgpt.config.recipe import PARALLEL_KEYS, Recipe, merged, read_recipe, recipe_from, sound_recipe
from dsgpt.config.run_config import plan_batch, split_batch
from dsgpt.machine.topology import Topology
from dsgpt.model.config import GPT2_VOCAB_SIZE, PRESETS, GPT2Config, length_problems, shape_problems
from dsgpt.planner import rates
from dsgpt.planner.hardware import find_gpu, find_instance, read_prices, recognise
from dsgpt.planner.options import CALIBRATION, PlanOptions, executed
from dsgpt.planner.setup import WORK, Setup
from dsgpt.planner.step_time import MeasuredStep, fit
from dsgpt.record.schema import RECORD_FILE, Fields
from dsgpt.record.suites import MAX_BYTES, SweepCell, read_sweep

# The setups that ``--recommend`` searches: strategies of the shipped recipes, with every split of the model.

RECIPES = Path("ds_configs")
_STRATEGY_KEYS = (
    *("zero_optimization", *PARALLEL_KEYS, "aio", "dsgpt", "activation_checkpointing"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
)
"""Keys of a recipe that the search sets; all others stay as they are."""
_DATA_PARALLEL = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


@dataclass(frozen=True, kw_only=True)
class CandidateSetup:
    """A strategy, without the batch."""

    name: str
    """Name of the strategy as in records, with a remark where two differ in a detail."""
    run_type: str
    blocks: dict[str, Any]
    """Blocks that it needs in the recipe."""

    def recipe(self, base: Recipe, path: Path, **more: Any) -> Recipe:
        """``base`` with this strategy, and ``more`` keys, as the file ``path``."""
        others = {key: value for key, value in base.raw.items() if key not in _STRATEGY_KEYS}
        return recipe_from(others | self.blocks | more, path)


def candidate_setups(devices: int, *, together: int) -> Iterator[CandidateSetup]:
    """Every way to train on ``devices``, the simplest first.

    Args:
        devices: GPUs of the training.
        together: GPUs of one machine; tensor and sequence peers are on the same one, so on several machines their
            number divides it.
    """
    for run_type in ("baseline",) if devices == 1 else ("ddp", "fsdp"):
        yield _candidate(run_type, "zero0", run_type)
    if devices > 1:
        yield _candidate("fsdp, sharded sums", "zero0", "fsdp", dsgpt={"fsdp": {"accumulation": "sharded"}})
    for recipe in _DATA_PARALLEL[4:] if devices == 1 else _DATA_PARALLEL:
        yield _candidate(recipe.replace("_", "-"), recipe)
    on_one_machine = [size for size in divisors(devices) if devices <= together or together % size == 0]
    for size in on_one_machine[1:]:
        yield _candidate(f"tensor{size}-zero1", "tensor", tensor_parallel={"autotp_size": size})
    for size in on_one_machine[1:]:
        yield _candidate(f"sequence{size}-zero1", "sequence", sequence_parallel_size=size)
    for stages in divisors(devices)[1:]:
        for tensor in on_one_machine:
            if devices // stages % tensor == 0:
                split, name = ({"autotp_size": tensor}, f"tensor{tensor}-") if tensor > 1 else (None, "")
                name = f"pipeline{stages}-{name}zero1"
                yield _candidate(name, "pipeline", pipeline={"stages": stages}, tensor_parallel=split)


def _candidate(name: str, recipe: str, run_type: str = "optimized", **blocks: Any) -> CandidateSetup:
    """A strategy with the blocks of a shipped recipe that belong to it, and ``blocks`` laid over them."""
    raw = json.loads((REPOSITORY / RECIPES / f"{recipe}.json").read_text(encoding="utf-8"))
    own = {key: raw[key] for key in ("zero_optimization", *PARALLEL_KEYS) if key in raw}
    return CandidateSetup(name=name, run_type=run_type, blocks=merged(own, blocks))


# ``--measured``: steps in the records of sweeps and of ``benchmark.py plan``, to which rates are fitted.


def read_measured(paths: tuple[Path, ...], calibration: rates.Calibration) -> list[MeasuredStep]:
    """The measured steps of every record.

    Raises:
        UserError: a record cannot be read, or has no step that can be fitted; one line.
    """
    measured, machine_of = [], partial(rates.calibrated_machine, calibration)
    for path in paths:
        try:
            record = read_object(path, max_bytes=MAX_BYTES)
            if "comparisons" in record:
                setups = [_of_sweep(cell) for cell in read_sweep(path).cells]
            else:
                setups = [_of_plan(cell) for cell in record.get("cells", [])]
        except JsonError as error:
            raise UserError(f"--measured {path}: cannot be read as a record: {error}") from error
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"--measured {path}: a cell is not as this program writes it ({reason})") from error
        steps = [
            MeasuredStep(setup=setup, machine=machine_of(devices=setup.world_size), seconds=seconds)
            for setup, seconds in filter(None, setups)
        ]
        if not (usable := [step for step in steps if step.setup.precision in step.machine.precisions]):
            raise UserError(f"--measured {path}: has no measured step of a setup that the planner knows")
        measured += usable
    return measured


def _of_sweep(cell: SweepCell) -> tuple[Setup, float] | None:
    """A cell of a sweep and the seconds of its step; None if no turn of it is done."""
    work = next((turn.work for turn in cell.done().values() if turn.work), None)
    if work is None or cell.tokens_per_sec is None:
        return None
    options, problems = parse_arguments(cell.flags)
    problems.raise_if_any()
    assert options.deepspeed_config is not None
    recipe, run_type = sound_recipe(REPOSITORY / options.deepspeed_config), options.run_type or ""
    total, micro, steps = int(work["global batch"]), options.micro_batch_size_per_gpu, options.grad_accum_steps
    ranks = cell.devices // recipe.parallel_of(run_type).ranks_per_copy
    batch = plan_batch(total, micro, steps, ranks=ranks, problems=problems, keep=None)
    problems.raise_if_any()
    assert batch is not None
    shape = {name: int(work[f"model {name}"]) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    setup = Setup(
        run_type=run_type,
        model=GPT2Config(**shape),
        recipe=recipe,
        world_size=cell.devices,
        precision=work["precision"],
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        seq_length=int(work["sequence length"]),
        activation_checkpointing=options.activation_checkpointing,
    )
    return setup, total * setup.seq_length / cell.tokens_per_sec.median


def _of_plan(result: Mapping[str, Any]) -> tuple[Setup, float] | None:
    """A cell of ``benchmark.py plan`` and the seconds of its step; None if it was not measured, or only tests a fit."""
    seconds = (result.get("step_seconds") or {}).get("measured")
    if not result.get("fit") or not seconds:
        return None
    work = result["work"]
    shipped = sound_recipe(REPOSITORY / "ds_configs" / work["recipe"])
    shape = {name: size for name, size in work["model"].items() if name != "name"}
    setup = Setup(
        model=GPT2Config(block_size=work["seq_length"], **shape),
        recipe=recipe_from(merged(shipped.raw, work["changes"]), shipped.path),
        world_size=result["ranks"],
        activation_checkpointing=work["activation_checkpointing"],
        **{name: work[name] for name in WORK},
    )
    return setup, seconds


# Runs that were held against a plan on this machine (``--plan``), and correct its next plan.

COUNT = 3
"""Runs that count: the newest."""
MOST = 2.0
"""Largest factor of a correction: what is farther off has another cause than rates."""


@dataclass(frozen=True, kw_only=True)
class OwnRun:
    """Tokens per second of a run."""

    planned: float
    """By the plan, before earlier runs corrected it."""
    measured: float


def own_runs(folder: Path, machine: rates.Machine) -> list[OwnRun]:
    """The newest runs in ``folder`` that ``machine`` executed as planned with the same rates, the newest first.

    What cannot be read, had other settings than its plan, did not take enough steps, or shared the CPUs with other
    programs is left out.
    """
    found = []
    for path in folder.glob(f"*/{RECORD_FILE}"):
        try:
            record = Fields(read_object(path), notes=[])
            changed = path.stat().st_mtime
        except (JsonError, OSError):
            continue
        plan, segments = record.section("plan"), record.sections("segments")
        planned, measured = (plan.number(key) or 0.0 for key in ("planned_tokens_per_sec", "tokens_per_sec"))
        hardware = record.section("hardware")
        name = hardware.text("gpu_name" if machine.kind == "cuda" else "cpu_name") or "?"
        gpu = recognise(name, int(hardware.number("gpu_memory_bytes") or 0))
        named = machine.name.startswith(name) or (gpu is not None and gpu.key == machine.name)
        same = plan.text("fingerprint") == machine.fingerprint and hardware.text("device") == machine.kind and named
        others = max((segment.number("cpu_share_of_others") or 0.0 for segment in segments), default=0.0)
        if same and min(planned, measured) > 0 and others < BUSY_FROM:
            found.append((changed, OwnRun(planned=planned, measured=measured)))
    return [run for _, run in sorted(found, key=lambda each: -each[0])[:COUNT]]


def corrected(machine: rates.Machine, runs: Sequence[OwnRun]) -> rates.Machine:
    """The machine at the speed of ``runs``: everything that it does takes longer, or shorter, by their median."""
    if not runs:
        return machine
    times = min(MOST, max(1 / MOST, median(run.planned / run.measured for run in runs)))
    planned, measured = ([getattr(run, name) for run in runs] for name in ("planned", "measured"))
    last = f"your last {counted(len(runs), 'run')} here: planned {_span(planned)}, measured {_span(measured)} tokens/s"

    names = (*rates.COMPUTING, *rates.SENDING, "host_sec", "host_link", "host_memory")
    slower = {each: getattr(machine, each).slower(times, *names) for each in ("rates", "slowest", "fastest")}
    return replace(machine, **slower, uncorrected=machine, basis=f"{machine.basis}; corrected by {last}")


def _span(values: Sequence[float]) -> str:
    """``41,200``, or ``39,800 to 40,300``."""
    low, high = (f"{value:,.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# From the flags of ``src/plan.py`` to the training that is planned; every mistake in them is collected.

SIZES = Path("ds_configs") / "sizes"


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The training to plan, checked as far as the checks do not need the batch's split."""

    options: PlanOptions
    model: GPT2Config
    recipe: Recipe
    machine: rates.Machine
    devices: int
    precision: str
    seq_length: int
    network_basis: str
    """Source of the speed between machines; empty if it is assumed."""

    @property
    def machines(self) -> int:
        """Number of machines."""
        return -(-self.devices // self.machine.devices)

    @property
    def run_type(self) -> str:
        """Run type of the flag, or ``optimized``."""
        return self.options.run_type or "optimized"

    def training(self, recipe: Recipe, run_type: str, *, problems: Problems) -> RunRequest:
        """The request as training's own checks take it."""
        batch = ("global_batch_size", "micro_batch_size_per_gpu", "grad_accum_steps")
        sizes, masks = {name: getattr(self.options, name) for name in batch}, self.options.mask_documents is not None
        ranks = self.devices
        return RunRequest(
            options=Options(run_type=run_type, mask_documents=masks, **sizes),
            topology=Topology(rank=0, local_rank=0, world_size=ranks, local_world_size=ranks, launcher="deepspeed"),
            recipe=recipe,
            model=self.model,
            seq_length=self.seq_length,
            device=self.machine.kind,
            precision=self.precision,
            mistakes=problems.copy(),
        )

    def setup(self, recipe: Recipe, run_type: str, micro: int, steps: int, *, activation_checkpointing: bool) -> Setup:
        """The training that formulas take.

        Raises:
            UserError: the recipe has no formula.
        """
        return Setup(
            run_type=run_type,
            model=self.model,
            recipe=recipe,
            world_size=self.devices,
            precision=self.precision,
            micro_batch_size=micro,
            gradient_accumulation_steps=steps,
            seq_length=self.seq_length,
            activation_checkpointing=activation_checkpointing,
            attended=self.options.mask_documents and min(self.options.mask_documents, self.seq_length),
        )


def read_request(options: PlanOptions, problems: Problems) -> PlanRequest:
    """Read what the flags name.

    Args:
        options: the flags.
        problems: the mistakes found so far.

    Raises:
        UserError: with every mistake, a line each.
    """
    if options.strategy is not None:
        for name in ("run_type", "deepspeed_config", "recommend"):
            if getattr(options, name):
                problems.add(f"--{name} and --strategy both name what is trained: leave one of them out")
        run_type = options.strategy if options.strategy in RUN_TYPES and not options.recommend else None
        options = replace(options, run_type=run_type)
    options, network_basis = _with_instance(options, problems)
    shape = PRESETS[options.model_size].as_dict() | {"vocab_size": GPT2_VOCAB_SIZE} | shape_overrides(options)
    mistakes = shape_problems(shape)
    problems.add(*mistakes)
    model = None if mistakes else GPT2Config(**shape)
    if (machine := _machine(options, problems)) is not None:
        machine = corrected(machine, own_runs(options.runs, machine))
    recipe = _recipe(options, problems)
    if model is not None:
        problems.add(*length_problems(options.seq_length or 0, model.block_size))
    if options.tokens is None and not problems.mention("--tokens"):
        problems.add("--tokens is missing: give the tokens of the training, such as 10e9")
    if options.eval_every and not options.val_tokens:
        problems.add("--eval_every needs --val_tokens, the tokens of a validation")
    if options.picture is not None and options.picture.suffix not in {".svg", ".png"}:
        problems.add(f"--picture {options.picture} must end in .svg or .png")
    _check_machines(options, machine, problems)
    if options.launcher == "python" and (options.gpus or 1) > 1:
        problems.add(f"--launcher python starts one rank, not {options.gpus}: take deepspeed, torchrun or slurm")
    _check_ignored(options, problems)
    precision = _precision(options, recipe, machine, problems) if recipe and machine else None
    problems.raise_if_any()
    assert model and machine and recipe and precision  # each is None only if a problem says why
    return PlanRequest(
        options=options,
        model=model,
        recipe=recipe,
        machine=machine,
        devices=options.gpus or (1 if machine.kind == "cuda" and options.gpu else machine.devices),
        precision=precision,
        seq_length=options.seq_length or model.block_size,
        network_basis=network_basis or machine.network_basis,
    )


def _with_instance(options: PlanOptions, problems: Problems) -> tuple[PlanOptions, str]:
    """The flags with those that ``--instance`` stands for, and where the speed of the network comes from."""
    basis = "as given" if options.network_gbps else ""
    if options.instance is None:
        return options, basis
    for name in ("gpu", "machine", "gpus_per_machine"):
        if getattr(options, name) is not None:
            problems.add(f"--{name} is what --instance names: leave one of them out")
    try:
        row = find_instance(read_prices(options.prices), options.instance)
    except UserError as error:
        problems.add(*error.problems)
        return options, basis
    if row.network_gbps and not basis:
        cards = f" with {counted(row.network_cards, 'card')}" if row.network_cards else ""
        basis = f"{row.instance}{cards}, {row.network_known_on}: {row.network_source}"
    named: dict[str, Any] = {"instance": row.instance, "gpu": row.gpu, "gpus_per_machine": row.gpus, "machine": None}
    gbps = options.network_gbps or row.network_gbps
    return replace(options, **named, gpus=options.gpus or row.gpus, network_gbps=gbps), basis


def fixed_setup(request: PlanRequest, problems: Problems) -> Setup:
    """The training that the flags name, its global batch split as training does.

    Raises:
        UserError: training would refuse it; every mistake, a line each.
    """
    training = request.training(request.recipe, request.run_type, problems=problems)
    check_split(training, problems)
    batch = split_batch(training, problems, [])
    problems.raise_if_any()
    assert batch is not None
    checkpointing = request.options.activation_checkpointing or request.recipe.activation_checkpointing is not None
    micro, steps = batch.micro_batch_size, batch.gradient_accumulation_steps
    return request.setup(request.recipe, request.run_type, micro, steps, activation_checkpointing=checkpointing)


def _recipe(options: PlanOptions, problems: Problems) -> Recipe | None:
    if options.deepspeed_config is not None:
        return read_recipe(options.deepspeed_config, problems)
    path = REPOSITORY / SIZES / f"{options.model_size}.json"
    if (recipe := read_recipe(path, problems)) and options.strategy:
        _, name = executed(options.strategy)
        path = RECIPES / f"{options.strategy}.json"
        return _candidate(name, name).recipe(recipe, path, train_batch_size=recipe.train_batch_size)
    return replace(recipe, path=SIZES / path.name) if recipe else None


def _machine(options: PlanOptions, problems: Problems) -> rates.Machine | None:
    if options.gpu is not None and options.machine is not None:
        problems.add("--gpu and --machine are two machines: give one of them")
    if options.gpu is None and problems.mention("--instance"):
        return None
    network = None if options.network_gbps is None else options.network_gbps * 1e9 / 8
    try:
        if options.gpu is not None:
            if options.measured:
                problems.add("--measured fits the rates of a calibration: leave out --gpu, or --measured")
            together = options.gpus_per_machine or rates.DEVICES_PER_MACHINE
            host, used = options.host_memory_gb, min(together, options.gpus or 1)
            host_bytes = None if host is None else int(host * 1e9 / used)
            gpu = find_gpu(options.gpu)
            return rates.datasheet_machine(gpu, devices=together, host_bytes=host_bytes, network=network)
        path = options.machine or CALIBRATION
        if options.machine is None and not path.exists():
            problems.add("--gpu is missing: name a GPU such as a100-80gb, or measure this machine with --calibrate")
            return None
        calibration = rates.read_calibration(path)
        machine = rates.calibrated_machine(calibration, devices=options.gpus, network=network)
        return fit(read_measured(options.measured, calibration)).applied(machine) if options.measured else machine
    except UserError as error:
        problems.add(*(f"--gpu: {line}" if options.gpu else line for line in error.problems))
        return None


def _precision(options: PlanOptions, recipe: Recipe, machine: rates.Machine, problems: Problems) -> str:
    best = "fp32" if machine.kind == "cpu" else "bf16" if "bf16" in machine.precisions else "fp16"
    precision = (recipe.precision or best) if options.precision == "auto" else options.precision
    if precision not in machine.precisions:
        where = "--precision" if options.precision != "auto" else f"{recipe.path}:"
        problems.add(f"{where} {precision}: {machine.name} has no units for it: take {' or '.join(machine.precisions)}")
    return precision


def _check_machines(options: PlanOptions, machine: rates.Machine | None, problems: Problems) -> None:
    """Launchers start equally many ranks on every machine; several that were calibrated need a known network."""
    if options.gpu is None and machine is None:
        return
    calibrated = machine if options.gpu is None else None
    devices, together = options.gpus or 1, options.gpus_per_machine or rates.DEVICES_PER_MACHINE
    together = calibrated.devices if calibrated else together
    if calibrated and devices > together and calibrated.network_gbps is None:
        problems.add(
            f"--gpus {devices}: the calibration measured {counted(together, 'device')} of one machine: take no more, "
            "or give --network_gbps, or measure the network between several (doctor.py --machine), or take --gpu"
        )
    elif devices > together and devices % together:
        instead = "" if calibrated else f", or --gpus_per_machine {divisors_around(devices, together)}"
        cure = f"take --gpus {multiples_around(devices, together)}{instead}"
        problems.add(f"--gpus {devices}: are not whole machines of {together} GPUs: {cure}")


def _check_ignored(options: PlanOptions, problems: Problems) -> None:
    """Note flags that another flag makes meaningless: a plan must not look as if it had followed them."""
    limit, written = "is a limit for --recommend: add it", "is of the command that --recommend writes: add it"
    replaced = "is replaced by --price_per_gpu_hour: leave one of them out"
    described = "describes machines of --gpu, but a calibration has its own: leave it out"
    for names, meaningless, why in (
        (("budget", "deadline"), not options.recommend, limit + ", or leave {flag} out"),
        (("launcher",), not options.recommend, written + ", or leave {flag} out"),
        (("run_type", "activation_checkpointing"), options.recommend, "is what --recommend searches: leave it out"),
        (("gpus_per_machine", "host_memory_gb"), options.gpu is None, described),
        (("save_every",), options.mtbf is not None, "is what --mtbf plans: leave one of them out"),
        (("prices", "spot"), options.price_per_gpu_hour is not None, replaced),
    ):
        for name in names if meaningless else ():
            if getattr(options, name) != getattr(PlanOptions, name):
                problems.add(f"--{name} {why.format(flag=f'--{name}')}")
