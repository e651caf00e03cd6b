"""``--measured``: steps in the records of sweeps and of ``benchmark.py plan``, to which rates are fitted."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.problems import Problems
from dsgpt.config.flags import parse_arguments
from dsgpt.config.recipe import read_recipe, recipe_from
from dsgpt.model.config import GPT2Config
from dsgpt.planning.fitting import MeasuredStep
from dsgpt.planning.rates import Machine
from dsgpt.planning.setup import Setup
from dsgpt.reports.sweeps import MAX_BYTES, SweepCell, read_sweep

MachineOf = Callable[[int], Machine]
"""The machine with this many devices at work."""


def read_measured(paths: tuple[Path, ...], machine_of: MachineOf, *, repository: Path) -> list[MeasuredStep]:
    """The measured steps of every record.

    Raises:
        UserError: a record cannot be read, or has no step that can be fitted; one line.
    """
    found = []
    for path in paths:
        try:
            steps = list(_steps(path, machine_of, repository=repository))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"--measured {path}: a cell is not as this program writes it ({reason})") from error
        steps = [step for step in steps if step.setup.precision in step.machine.precisions]
        if not steps:
            raise UserError(f"--measured {path}: has no measured step of a setup that the planner knows")
        found += steps
    return found


def _steps(path: Path, machine_of: MachineOf, *, repository: Path) -> Iterator[MeasuredStep]:
    try:
        record = read_object(path, max_bytes=MAX_BYTES)
    except JsonError as error:
        raise UserError(f"--measured {path}: cannot be read as a record: {error}") from error
    if "comparisons" in record:
        yield from _of_a_sweep(path, machine_of, repository=repository)
        return
    for result in record.get("cells", []):
        seconds = (result.get("step_seconds") or {}).get("measured")
        if result.get("fit") and seconds:
            setup = _setup_of_result(result, repository=repository)
            yield MeasuredStep(setup=setup, machine=machine_of(setup.world_size), seconds=seconds)


def _of_a_sweep(path: Path, machine_of: MachineOf, *, repository: Path) -> Iterator[MeasuredStep]:
    for cell in read_sweep(path).cells:
        work = next((turn.work for turn in cell.done().values() if turn.work), None)
        if work is None or cell.tokens_per_sec is None:
            continue
        setup = _setup_of_cell(cell, work, repository=repository)
        tokens = int(work["global batch"]) * setup.seq_length
        yield MeasuredStep(
            setup=setup, machine=machine_of(setup.world_size), seconds=tokens / cell.tokens_per_sec.median
        )


def _setup_of_cell(cell: SweepCell, work: Mapping[str, Any], *, repository: Path) -> Setup:
    from dsgpt.config.batch import BatchRequest, plan_batch  # noqa: PLC0415 - only sweeps need it

    options, problems = parse_arguments(cell.flags)
    assert options.deepspeed_config is not None
    recipe = read_recipe(repository / options.deepspeed_config, problems)
    run_type = options.run_type or ""
    problems.raise_if_any()
    assert recipe is not None
    given = BatchRequest(
        global_batch_size=int(work["global batch"]),
        micro_batch_size=options.micro_batch_size_per_gpu,
        gradient_accumulation_steps=options.grad_accum_steps,
    )
    ranks = cell.devices // recipe.parallel_of(run_type).ranks_per_copy
    batch, _ = plan_batch(given, data_parallel_size=ranks, enforce_global=False, problems=problems)
    problems.raise_if_any()
    assert batch is not None
    shape = {name: int(work[f"model {name}"]) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    return Setup(
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


def _setup_of_result(result: Mapping[str, Any], *, repository: Path) -> Setup:
    work, problems = result["work"], Problems()
    shipped = read_recipe(repository / "ds_configs" / work["recipe"], problems)
    problems.raise_if_any()
    assert shipped is not None
    shape = {name: size for name, size in work["model"].items() if name != "name"}
    return Setup(
        run_type=work["run_type"],
        model=GPT2Config(block_size=work["seq_length"], **shape),
        recipe=recipe_from(_merged(shipped.raw, work["changes"]), shipped.path),
        world_size=result["ranks"],
        precision=work["precision"],
        micro_batch_size=work["micro_batch_size"],
        gradient_accumulation_steps=work["gradient_accumulation_steps"],
        seq_length=work["seq_length"],
        activation_checkpointing=work["activation_checkpointing"],
    )


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``; blocks that both have are merged."""
    found = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both else value
    return found
