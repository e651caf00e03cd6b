"""Records that the program writes of runs that were resolved here and not trained."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from small_run import RECIPE, command_line, write_data

from dsgpt.common.errors import Problems
from dsgpt.config.options import parse_arguments
from dsgpt.config.recipe import read_recipe
from dsgpt.config.run_config import RunConfig, resolve
from dsgpt.machine.process_group import HostGroup
from dsgpt.machine.topology import read_topology
from dsgpt.record.runs import Run, read_run
from dsgpt.strategies.base import StepResult
from dsgpt.training.data_check import data_hash, initial_weights_hash
from dsgpt.training.journal import Journal
from dsgpt.training.run_description import describe_run
from dsgpt.training.sinks import open_sinks

WITHOUT_SHAPE = {"num_layers": None, "num_heads": None, "embedding_size": None, "max_position_embeddings": None}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a user asks for, in addition to the defaults of ``small_run``."""

    flags: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    """By place in the JSON, ``zero_optimization.stage``."""
    ranks: int = 1
    elsewhere: bool = False
    """The recipe is for another machine: it is read and put into the run, but not checked against this machine."""
    adapt: Callable[[RunConfig], RunConfig] = lambda config: config
    """Changes the resolved run, for settings that this machine refuses."""
    changes: Sequence[dict[str, Any]] = ()
    """At resumes."""
    recipe_name: str = "recipe.json"
    indent: int | None = None
    """Of the recipe's text."""


def recipe_of(asked: Asked) -> dict[str, Any]:
    """``RECIPE`` with what was asked for."""
    recipe = json.loads(json.dumps(RECIPE))
    for place, value in asked.recipe.items():
        *blocks, key = place.split(".")
        block = recipe
        for name in blocks:
            block = block.setdefault(name, {})
        block[key] = value
    return recipe


def resolved(folder: Path, asked: Asked) -> RunConfig:
    """The run that the program resolves from ``asked``."""
    path = write_data(folder) / asked.recipe_name
    path.write_text(json.dumps(recipe_of(asked), indent=asked.indent))
    problems = Problems()
    if asked.elsewhere:
        recipe = read_recipe(path, problems)
        path.write_text(json.dumps(RECIPE))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(asked.ranks), "LOCAL_WORLD_SIZE": str(asked.ranks)}
    flags = {"precision": "fp32", "deepspeed_config": path} | asked.flags
    options, found = parse_arguments(command_line(folder, **flags))
    config = resolve(options, topology=read_topology(ranks if asked.ranks > 1 else {}), problems=found)
    problems.raise_if_any()
    return asked.adapt(replace(config, recipe=recipe) if asked.elsewhere else config)


def run_of(folder: Path, asked: Asked, *, name: str = "run", change: Callable[[dict], Any] = lambda _: None) -> Run:
    """The run as the charts read it from the record that ``describe_run`` and ``Journal`` write when it has ended.

    ``change`` edits the record before it is read, in place.
    """
    config, problems = resolved(folder, asked), Problems()
    files = {"train": config.train, "val": config.val}
    hashes: dict[str, str | None] = {
        key: data_hash(file, verify=False, problems=problems) for key, file in files.items()
    }
    hashes["initial weights"] = initial_weights_hash(config)
    description = describe_run(config, hashes=hashes, resumed_from=None, changes=asked.changes, run_id=None)
    config.run_dir.mkdir(parents=True)
    sinks = open_sinks(config, done=0)
    journal = Journal(config, device=torch.device("cpu"), description=description, sinks=sinks, ranks=HostGroup())
    for step in range(1, config.total_steps + 1):
        number = torch.tensor(1.0)
        result = StepResult(loss=number, own_loss=number, grad_norm=number, lr=0.1, skipped=torch.tensor(False))
        journal.step_done(journal.step_begins(), step=step, epoch=0, result=result, dataload_sec=0.0, watched=False)
    journal.flush()
    journal.write("completed")
    journal.close()
    path = config.run_dir / "training_metrics.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    return read_run(path, name=name)
