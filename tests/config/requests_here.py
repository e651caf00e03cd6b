"""Resolves a request without training it."""

from pathlib import Path
from typing import Any

from small_run import command_line

from dsgpt.config.options import parse_arguments
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.topology import read_topology


def resolved(folder: Path, environment: dict[str, str] | None = None, **changes: Any) -> RunConfig:
    options, problems = parse_arguments(command_line(folder, **changes))
    return resolve(options, topology=read_topology(environment or {}), problems=problems)
