"""Imports point one way, and what is slow to import is imported only by what needs it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import REPOSITORY, command_line, write_data, write_recipe

SOURCES = REPOSITORY / "src"
PACKAGE = SOURCES / "dsgpt"

LAYERS = [
    {
        "errors",
        "ancestors",
        "interruption",
        "files",
        "json_files",
        "problems",
        "hub_access",
        "topology",
        "options",
        "cli_reader",
        "recipe_keys",
        "recipe",
        "recipe_reader",
        "recipe_zero",
        "machine_probe",
        "record_page",
        "batch",
    },
    {"tokenizer_files"},
    {"model", "data", "optimization", "device", "process_group"},
    {"telemetry"},
    {"length", "combinations", "cli_flags", "init_from", "planning"},
    {"config", "cli"},
    {"checkpointing"},
    {"strategies"},
    {"inference"},
    {"training"},
    {"main"},
    {"parity"},
    {"any_to_any", "save_benchmark"},
    {"faults"},
]
"""A module imports from its own part of the package and from lower layers; parts of one layer do not know each other,
except for those of the first."""

LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_every_part_of_the_package_has_a_layer():
    assert {part_of(path) for path in modules()} == set(LEVEL)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path):
    own = part_of(path)
    for name in imported(path):
        if not name.startswith("dsgpt."):
            continue
        other = name.split(".")[1]
        same = other == own or (LEVEL[other] == LEVEL[own] == 0)
        assert same or LEVEL[other] < LEVEL[own], f"{own} imports {name}"


def test_foundations_need_nothing_but_the_standard_library_and_pydantic():
    """Which takes 0.1 s to import, and which DeepSpeed brings along anyway."""
    for part in LAYERS[0]:
        outside = {name.split(".")[0] for name in imported(PACKAGE / f"{part}.py")}
        assert outside <= sys.stdlib_module_names | {"dsgpt", "pydantic"}


def test_nothing_in_the_package_imports_a_script():
    scripts = {path.stem for folder in ("src", "charts", "data_prep") for path in (REPOSITORY / folder).glob("*.py")}
    assert {"gpt2", "generate", "generate_charts", "preprocess"} <= scripts
    for path in modules():
        assert not {name.split(".")[0] for name in imported(path)} & scripts


def test_only_deepspeeds_strategies_import_it():
    files = [*SOURCES.rglob("*.py"), *(REPOSITORY / "charts").glob("*.py"), *(REPOSITORY / "data_prep").glob("*.py")]
    users = {path for path in files if any(name.split(".")[0] == "deepspeed" for name in imported(path))}
    assert PACKAGE / "strategies" / "pipeline_layers.py" in users
    assert {path.parent for path in users} == {PACKAGE / "strategies"}
    assert not {path.stem for path in users} & {"base", "build", "baseline", "ddp", "fsdp"}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("charts", {"dsgpt.telemetry.record", "dsgpt.files", "dsgpt.json_files", "dsgpt.errors"}),
        (
            "data_prep",
            {
                *("dsgpt.data.token_file", "dsgpt.hub_access", "dsgpt.tokenizer_files"),
                *("dsgpt.files", "dsgpt.json_files", "dsgpt.errors"),
            },
        ),
    ],
)
def test_charts_and_data_preparation_know_only_the_file_contracts(folder, allowed):
    for path in (REPOSITORY / folder).glob("*.py"):
        used = {name.rpartition(".")[0] for name in imported(path) if name.split(".")[0] == "dsgpt"}
        assert used <= allowed, path


def imported_by(*arguments: object, cwd: Path) -> set[str]:
    """Top-level packages that a command really imports, as ``python -X importtime`` lists them."""
    command = [sys.executable, "-X", "importtime", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(re.findall(r"^import time:.*\|\s+([a-zA-Z_0-9]+)", done.stderr, flags=re.MULTILINE))


@pytest.mark.parametrize(
    "module", ["dsgpt.telemetry.record", "dsgpt.data.token_file", "dsgpt.model.config", "dsgpt.tokenizer_files"]
)
def test_contracts_import_no_torch(module, tmp_path):
    found = imported_by("-c", f"import {module}", cwd=tmp_path)
    assert "dsgpt" in found
    assert not found & {"torch", "deepspeed", "transformers"}


@pytest.mark.parametrize("script", ["gpt2.py", "generate.py", "convert.py"])
def test_help_starts_fast(script, tmp_path):
    found = imported_by(SOURCES / script, "--help", cwd=tmp_path)
    assert "dsgpt" in found
    assert not found & {"torch", "deepspeed", "transformers"}


def test_baseline_trains_without_deepspeed(tmp_path):
    write_recipe(write_data(tmp_path) / "recipe.json")
    found = imported_by(SOURCES / "gpt2.py", *command_line(tmp_path), cwd=tmp_path)
    assert (tmp_path / "run" / "RUN_COMPLETE.txt").exists()
    assert "torch" in found
    assert "deepspeed" not in found
