"""Whether cells that are compared will do the same work: judged before anything runs, by the facts of a record."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsgpt.benchmarks.sweep.cells import MAY_DIFFER, Cell, ComparisonPlan, Suite
from dsgpt.common.errors import UserError
from dsgpt.common.files import sha256_of
from dsgpt.common.problems import Problems
from dsgpt.config.flags import parse_arguments
from dsgpt.reports.equal_work import Verdict, judge
from dsgpt.reports.sweeps import Kind, Turn, Worked, worked
from dsgpt.runtime.topology import Topology

Work = Mapping[str, Any]


def planned_work(cell: Cell, flags: Sequence[str], *, repository: Path) -> Work | None:
    """What a cell would compute; None if this program would refuse it, which the sweep then records.

    Args:
        cell: where it runs.
        flags: all of ``src/gpt2.py``.
        repository: from which relative paths are.
    """
    from dsgpt.config.run_config import resolve  # noqa: PLC0415 - torch takes seconds
    from dsgpt.reports.fields import Fields  # noqa: PLC0415
    from dsgpt.reports.work_facts import read_work  # noqa: PLC0415
    from dsgpt.training.run_description import describe_run  # noqa: PLC0415

    options, problems = parse_arguments(flags)
    options = replace(
        options,
        **{
            name: repository / path
            for name in ("train_data_path", "val_data_path", "deepspeed_config", "checkpoint_path")
            if (path := getattr(options, name)) is not None
        },
    )
    topology = Topology(
        rank=0, local_rank=0, world_size=cell.devices, local_world_size=cell.devices, launcher=cell.launcher
    )
    try:
        config = resolve(options, topology=topology, problems=problems)
    except UserError:
        return None
    hashes = {
        "train": config.train.sidecar.sha256 or sha256_of(config.train.path),
        "val": config.val.sidecar.sha256 or sha256_of(config.val.path),
        "initial weights": config.init_from.sha256 if config.init_from else None,
    }
    record = describe_run(config, hashes=hashes, resumed_from=None, changes=(), run_id=None)
    steps = config.total_steps
    return read_work(Fields(record, notes=[]), steps=steps, tokens=steps * config.tokens_per_step)


def require_equal_work(suite: Suite, works: Mapping[str, Work | None]) -> None:
    """Refuse a suite that would compare different work.

    Args:
        suite: what is compared.
        works: of every cell, by name; None for those that are refused.

    Raises:
        UserError: with a line for each cell that does other work than its baseline.
    """
    problems = Problems()
    for plan in suite.comparisons:
        base = works[plan.baseline]
        for name in plan.cells:
            work = works[name]
            if base is not None and work is not None and (why := _unequal(suite, plan, name, base=base, work=work)):
                problems.add(f"comparison {plan.name!r} ({plan.kind}): {name} beside {plan.baseline}: {why}")
    problems.raise_if_any()


def _unequal(suite: Suite, plan: ComparisonPlan, name: str, *, base: Work, work: Work) -> str:
    """Why the cell may not be compared; empty if it may."""
    verdict = judge([Worked(plan.baseline, base), Worked(name, work)])
    if not comparable(verdict, plan.kind):
        return f"{verdict.line()}: give both the same, or compare them as another kind"
    one, other = suite.cell(plan.baseline).devices, suite.cell(name).devices
    if plan.kind == "weak scaling" and work["global batch"] * one != base["global batch"] * other:
        per_device = f"{work['global batch'] / other:g} vs {base['global batch'] / one:g}"
        return f"sequences per device differ: {per_device}: weak scaling keeps them constant"
    return ""


def judge_turns(turns: Iterable[tuple[str, Turn]]) -> Verdict:
    """Whether turns, each under the name of what it belongs to, did the same work; equal ones are named once."""
    distinct: list[Worked] = []
    for name, turn in turns:
        one = worked(turn, name=name)
        if one not in distinct:
            distinct.append(one)
    return judge(distinct)


def comparable(verdict: Verdict, kind: Kind) -> bool:
    """Whether two runs differ, or may differ, only in facts in which a comparison of this kind allows it."""
    unknown = [fact for facts in verdict.unknown.values() for fact in facts]
    facts = [*(difference.fact for difference in verdict.differences), *unknown]
    return all(fact.startswith(MAY_DIFFER[kind]) for fact in facts)
