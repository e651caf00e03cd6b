"""How one fault of the campaign ended."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one fault ended."""

    kind: str
    """``kill``, ``request``, ``damage``, ``disk`` or ``launch``."""
    name: str
    """What was done to which run."""
    wrong: str = ""
    """Every check that failed, in words; empty if all passed."""
    not_run: str = ""
    """Why this machine cannot run it; empty if it was run."""
    seconds: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    """What the run printed about the fault, without the paths of this machine."""

    @property
    def status(self) -> str:
        """``passed``, ``failed`` or ``not run``."""
        return "not run" if self.not_run else "failed" if self.wrong else "passed"


def all_wrong(*findings: tuple[bool, str]) -> str:
    """The messages of the findings that are true, joined; empty if none is."""
    return "; ".join(words for holds, words in findings if holds)


def first_error(output: str) -> str:
    """The first line with an error; launchers print many lines after it."""
    lines = [line.strip() for line in output.splitlines()]
    return next((line for line in lines if "rror: " in line or line.startswith("error: ")), output[-300:])
