"""Recipe files: change one, read one, list its mistakes; and a request that is resolved without training it."""

from pathlib import Path
from typing import Any

import training_runs
from small_run import REPOSITORY, command_line

from dsgpt.common.errors import UserError
from dsgpt.config.recipe import sound_recipe
from dsgpt.config.run_config import RunConfig
from dsgpt.machine.topology import Topology

# Recipe files: change one, read one, list its mistakes.


SHIPPED = sorted((REPOSITORY / "ds_configs").glob("*.json"))


def problems_of(path: Path) -> list[str]:
    try:
        sound_recipe(path)
    except UserError as error:
        assert not any("\n" in line for line in error.problems)
        return [line.removeprefix("--deepspeed_config ").removeprefix(f"{path}: ") for line in error.problems]
    return []


# Resolves a request without training it.


def resolved(folder: Path, topology: Topology | None = None, **changes: Any) -> RunConfig:
    return training_runs.resolved(command_line(folder, **changes), topology)
