"""``src/plan.py`` after its flags are read: calibrates, plans one setup, or recommends one."""

import json
from pathlib import Path

from dsgpt.advising.options import CALIBRATION, PlanOptions
from dsgpt.advising.plan import Plan, plan_of
from dsgpt.advising.recommendation import (
    best_of,
    recommendation_json,
    recommendation_lines,
    write_recommendation,
)
from dsgpt.advising.request import PlanRequest, fixed_batch, read_request
from dsgpt.advising.search import search
from dsgpt.advising.table import plan_json, plan_lines
from dsgpt.common.errors import EXIT_DONE
from dsgpt.common.problems import Problems
from dsgpt.planning.prices import TABLE, read_prices


def act(options: PlanOptions, problems: Problems, *, repository: Path) -> int:
    """Do what the flags ask for; return the exit code.

    Args:
        options: the flags.
        problems: the mistakes in them that were found so far.
        repository: has the recipes.

    Raises:
        UserError: with every mistake, a line each.
    """
    if options.calibrate:
        return _calibrate(options, problems)
    request = read_request(options, problems, repository=repository)
    if options.recommend:
        return _recommend(request, repository=repository)
    plan = _fixed(request, problems)
    _print(plan_json(plan) if options.json else plan_lines(plan))
    return EXIT_DONE


def _calibrate(options: PlanOptions, problems: Problems) -> int:
    problems.raise_if_any()
    from dsgpt.calibration.calibrate import calibrate  # noqa: PLC0415 - torch takes seconds

    path = options.machine or CALIBRATION
    calibrate(path, seconds=options.seconds, devices=options.gpus)
    print(path)
    return EXIT_DONE


def _fixed(request: PlanRequest, problems: Problems) -> Plan:
    """The plan of the setup that the flags name."""
    batch = fixed_batch(request, problems)
    problems.raise_if_any()
    assert batch is not None
    checkpointing = request.options.activation_checkpointing or request.recipe.activation_checkpointing is not None
    setup = request.setup(request.recipe, request.run_type, batch, activation_checkpointing=checkpointing)
    return plan_of(setup, request.machine, request.options, read_prices(request.options.prices or TABLE))


def _recommend(request: PlanRequest, *, repository: Path) -> int:
    found = search(request, read_prices(request.options.prices or TABLE), repository=repository)
    best = best_of(found, request)
    written = write_recommendation(best, request)
    if request.options.json:
        _print(recommendation_json(found, best, written))
    else:
        _print(recommendation_lines(found, best, written))
    return EXIT_DONE


def _print(found: object) -> None:
    if isinstance(found, list):
        print("\n".join(found))
    else:
        print(json.dumps(found, indent=2, allow_nan=False))
