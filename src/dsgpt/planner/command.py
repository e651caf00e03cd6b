"""``src/plan.py`` after its flags are read: calibrates, plans one setup, or recommends one."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from dsgpt.common.errors import EXIT_DOES_NOT_FIT, EXIT_DONE, Problems, UserError
from dsgpt.common.files import write_atomic
from dsgpt.common.text import next_line, script_words
from dsgpt.planner.hardware import PRICES as TABLE
from dsgpt.planner.hardware import read_prices
from dsgpt.planner.options import PlanOptions
from dsgpt.planner.plan import Plan, plan_lines, plan_of, with_assumptions
from dsgpt.planner.published import published_page
from dsgpt.planner.rates import CALIBRATION
from dsgpt.planner.request import PlanRequest, fixed_setup, read_request
from dsgpt.planner.search import best_of, recommendation_json, recommendation_lines, search, write_recommendation

Draw = Callable[[Plan, Path], None]
"""Draws the picture of a plan to a file."""


def act(options: PlanOptions, problems: Problems, *, repository: Path, draw: Draw) -> int:
    """Do what the flags ask for; return the exit code.

    Args:
        options: the flags.
        problems: the mistakes in them that were found so far.
        repository: has the recipes.
        draw: for ``--picture``.

    Raises:
        UserError: with every mistake, a line each.
    """
    if options.calibrate:
        return _calibrate(options, problems)
    if options.published is not None:
        problems.raise_if_any()
        page = published_page(repository=repository).encode()
        with _writing("--published", options.published):
            write_atomic(options.published, page)
        print(options.published)
        return EXIT_DONE
    request = read_request(options, problems, repository=repository)
    if options.recommend:
        return _recommend(request, repository=repository, draw=draw)
    prices = read_prices(options.prices or TABLE)
    plan = plan_of(fixed_setup(request, problems), request, prices)
    _draw(plan, options, draw)
    _print(with_assumptions(plan) if options.json else plan_lines(plan))
    return EXIT_DONE if plan.fits else EXIT_DOES_NOT_FIT


def _calibrate(options: PlanOptions, problems: Problems) -> int:
    path = options.machine or CALIBRATION
    if path.is_dir():
        problems.add(f"--machine {path}: is a folder; name the file to write")
    problems.raise_if_any()
    from dsgpt.planner.calibrate import calibrate  # noqa: PLC0415 - torch takes seconds

    with _writing("--machine", path):  # the first thing that is measured is the disk of its folder
        calibrate(path, seconds=options.seconds, devices=options.gpus)
    print(path)
    print(next_line(script_words("src/plan.py", "--machine", path, "--model_size", "tiny", "--tokens", "1e6")))
    return EXIT_DONE


def _recommend(request: PlanRequest, *, repository: Path, draw: Draw) -> int:
    found = search(request, read_prices(request.options.prices or TABLE), repository=repository)
    best = best_of(found, request)
    with _writing("--into", request.options.into):
        written = write_recommendation(best, request)
    assert best.plan is not None
    _draw(best.plan, request.options, draw)
    if request.options.json:
        _print(recommendation_json(found, best, written))
    else:
        _print(recommendation_lines(found, best, written))
    return EXIT_DONE


def _draw(plan: Plan, options: PlanOptions, draw: Draw) -> None:
    if options.picture is not None:
        with _writing("--picture", options.picture):
            draw(plan, options.picture)


@contextlib.contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    """Turn a refusal of the file system into one line about ``flag``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror or error})") from error


def _print(found: object) -> None:
    if isinstance(found, list):
        print("\n".join(found))
    else:
        print(json.dumps(found, indent=2, allow_nan=False))
