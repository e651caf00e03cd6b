"""Releases of DeepSpeed that train wrong, most without an error. docs/training.md shows ``KNOWN_BAD`` as a table."""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from dsgpt.common.problems import Problems
from dsgpt.config.compatibility import Request

TESTED = "0.19.8"
"""The release of DeepSpeed that requirements.txt pins; the suites compared this one with plain PyTorch."""
ALLOW = "DSGPT_ALLOW_VERSION"
"""The environment variable that lets a run start all the same, if it is 1."""


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """A fault of some releases. A run is affected if all that is named here is true of it."""

    releases: str
    """Of DeepSpeed, as pip writes them."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """Of ZeRO."""
    precision: str = "any"
    needs: str = ""
    """``accumulation in a pipeline``, ``overlap_comm on GPUs`` or ``several ranks``."""
    thread: str
    """On GitHub, below DeepSpeed's repository; or ``no thread``, for what this project saw itself."""
    effect: str


KNOWN_BAD = (
    KnownBad(
        releases=">=0.17.6,<0.18.3",
        stages=(2,),
        thread="issues/7718",
        effect="gradients are wrong: their norm is a third to a half",
    ),
    KnownBad(
        releases="<0.18.3",
        needs="accumulation in a pipeline",
        thread="issues/7773",
        effect="gradients of micro batches are summed, not averaged",
    ),
    KnownBad(
        releases="==0.18.5",
        stages=(0,),
        precision="bf16",
        thread="issues/7837",
        effect="gradients are divided by a loss scale that the loss never had, and kept from step to step",
    ),
    KnownBad(
        releases=">=0.18.3,<0.19.0",
        stages=(1,),
        precision="bf16",
        needs="several ranks",
        thread="pull/7985",
        effect="the last micro batch is left out of the average over ranks",
    ),
    KnownBad(
        releases="<0.19.0",
        stages=(1, 2),
        needs="overlap_comm on GPUs",
        thread="pull/7965",
        effect="buffers are used again before their reduction is done: wrong gradients or NaN",
    ),
    KnownBad(
        releases="==0.18.9",
        stages=(1, 2),
        thread="no thread",
        effect="the first step ends in the error 'Output 0 of Split is a view'",
    ),
)


def check_version(request: Request, accumulation: int, problems: Problems, notices: list[str]) -> tuple[str, ...]:
    """Refuse a run that the installed DeepSpeed trains wrong, or note that ``ALLOW`` lets it start.

    Args:
        request: the run.
        accumulation: micro batches per optimizer step.
        problems: receives the refusals.
        notices: receives a line if the installed release is not the tested one, and what was allowed.

    Returns:
        The threads of the faults that were allowed.
    """
    if request.options.run_type != "optimized":
        return ()
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        problems.add(f"--run_type optimized needs DeepSpeed: install it (pip install deepspeed=={TESTED})")
        return ()
    if installed == TESTED:
        return ()
    notices.append(f"DeepSpeed {installed} is installed; this program is tested with {TESTED} (requirements.txt)")
    found = [known for known in KNOWN_BAD if _affects(known, request, accumulation, installed)]
    allowed = os.environ.get(ALLOW) == "1"
    for known in found:
        fault = f"{known.effect} (DeepSpeed's {known.thread})"
        if allowed:
            notices.append(f"{ALLOW}=1 lets DeepSpeed {installed} train, though {fault}")
        else:
            problems.add(
                f"{request.recipe.path}: DeepSpeed {installed} cannot train this: {fault}: install {TESTED} (pip "
                f"install deepspeed=={TESTED}), or set {ALLOW}=1 to train all the same"
            )
    return tuple(known.thread for known in found) if allowed else ()


def _affects(known: KnownBad, request: Request, accumulation: int, installed: str) -> bool:
    needed = {
        "": True,
        "accumulation in a pipeline": request.sizes.pipeline > 1 and accumulation > 1,
        "overlap_comm on GPUs": request.device == "cuda" and bool(request.recipe.zero_optimization.overlap_comm),
        "several ranks": request.topology.world_size > 1,
    }
    return (
        SpecifierSet(known.releases).contains(installed, prereleases=True)
        and request.recipe.zero_stage in known.stages
        and known.precision in ("any", request.precision)
        and needed[known.needs]
    )
