"""What a suite is to the command line: its help, its flags, and what they start."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from dsgpt.benchmarks.harness.command import SuiteOptions
from dsgpt.benchmarks.harness.flags import SuiteFlags
from dsgpt.benchmarks.harness.pages import SuitePage

Options = TypeVar("Options", bound=SuiteOptions)
Options_contra = TypeVar("Options_contra", bound=SuiteOptions, contravariant=True)


class RunSuite(Protocol[Options_contra]):
    """Runs a suite and returns its exit code."""

    def __call__(self, options: Options_contra, *, repository: Path) -> int:
        """Run it as ``options`` say, with the scripts and recipes of ``repository``."""


@dataclass(frozen=True, kw_only=True)
class Suite(Generic[Options]):
    """A measurement that ``src/benchmark.py`` offers."""

    description: str
    """What it does, what it costs and what its exit codes mean."""
    examples: str
    """The end of its help."""
    add_flags: Callable[[SuiteFlags], None]
    """Adds the flags that it does not share with every suite."""
    options: type[Options]
    """The fields are the flags."""
    run: RunSuite[Options]
    page: SuitePage
