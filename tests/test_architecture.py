"""Imports between rooms have one direction, slow imports happen only where they are needed, and the page says so."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import REPOSITORY, command_line, write_data, write_recipe

from dsgpt.config.options import PACKAGES

SOURCES = REPOSITORY / "src"
PACKAGE = SOURCES / "dsgpt"

FLOORS = (
    ("common",),
    ("machine", "model"),
    ("formats", "data"),
    ("config",),
    ("record",),
    ("telemetry", "checkpoints"),
    ("planner", "strategies"),
    ("inference",),
    ("training",),
    ("charts",),
    ("dashboard", "benchmarks"),
)
"""The rooms of the package, from the ground up. A room imports only from rooms that stand before it, so no cycle is
possible."""
ROOMS = [room for floor in FLOORS for room in floor]


@functools.cache
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


def modules() -> list[Path]:
    """Of the rooms: ``dsgpt/__main__.py`` stands above them."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" and path.parent != PACKAGE)


SCRIPTS = {path.stem for folder in ("src", "charts", "data_prep") for path in (REPOSITORY / folder).glob("*.py")}
FOUNDATIONS = {"common/*", "config/options", "config/recipe", "config/recipe_blocks", "machine/topology"}
"""They need nothing but the standard library and pydantic, which takes 0.1 s to import. DeepSpeed needs it anyway."""


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_follow_the_floors(path):
    own = ROOMS.index(path.relative_to(PACKAGE).parts[0])
    for name in imported(path):
        assert name.split(".")[0] not in SCRIPTS
        if name.startswith("dsgpt."):
            assert name.split(".")[1] in ROOMS[: own + 1], f"{ROOMS[own]} imports {name}"
    if any(path.match(f"dsgpt/{foundation}.py") for foundation in FOUNDATIONS):
        assert {name.split(".")[0] for name in imported(path)} <= sys.stdlib_module_names | {"dsgpt", "pydantic"}


FOUNDATIONS = {
    "common": sorted(path.stem for path in (PACKAGE / "common").glob("*.py")),
    "config": ["options", "recipe", "recipe_blocks"],
    "machine": ["topology"],
}
"""Pydantic takes 0.1 s to import, and DeepSpeed brings it along anyway."""


@pytest.mark.parametrize(
    ("library", "folders"),
    [("deepspeed", {"src/dsgpt/strategies/deepspeed"}), ("streamlit", {"src/dsgpt/dashboard", "charts"})],
)
def test_only_its_folder_imports_a_library(library, folders):
    files = [path for top in ("src", "charts", "data_prep") for path in (REPOSITORY / top).rglob("*.py")]
    users = {path for path in files if any(name.split(".")[0] == library for name in imported(path))}
    assert {path.parent.relative_to(REPOSITORY).as_posix() for path in users} == folders


LIGHT = {
    "common": sorted(path.stem for path in (PACKAGE / "common").glob("[a-z]*.py")),
    "config": ["options", "recipe", "run_config"],
    "data": ["token_file"],
    "formats": ["tokenizer_files"],
    "inference": ["commands"],
    "machine": ["launcher", "probe", "topology"],
    "model": ["config"],
    "planner": ["hardware", "memory", "rates", "step_time"],
    "record": sorted(path.stem for path in (PACKAGE / "record").glob("[a-z]*.py")),
    "training": ["status"],
}
"""Modules of each room that scripts import before they know what they have to do."""


@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        (["generate"], {"torch", "numpy", "pydantic"}),
        (
            ["benchmark", "plan", *(f"dsgpt.{room}.{name}" for room, names in LIGHT.items() for name in names)],
            {"torch", "deepspeed", "transformers", "numpy"},
        ),
        (["dsgpt.data.download", "dsgpt.data.preparation"], {"torch", "transformers", "datasets", "pyarrow"}),
        ([f"dsgpt.dashboard.{name}" for name in ("overview", "compare", "live")], {"torch", "matplotlib", "seaborn"}),
    ],
    ids=["generate", "the others", "preparation of text", "pages of runs"],
)
def test_light_modules_import_nothing_slow(modules, slow):
    code = "import importlib, sys\n"
    code += f"for name in {modules}: print(name, importlib.import_module(name) and {slow} & sys.modules.keys())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} set()" for name in modules]


@pytest.mark.parametrize(
    ("run_type", "needed", "slow"),
    [("baseline", "torch", {"deepspeed", *sum(PACKAGES.values(), ())}),
     ("optimized", "deepspeed", {"functorch", "jinja2", "networkx"})],
)  # fmt: skip
def test_a_training_imports_nothing_slow(tmp_path, run_type, needed, slow):
    """To check whether the optimizer is Muon, DeepSpeed would import Inductor, which takes each rank about 2 s."""
    write_recipe(write_data(tmp_path) / "recipe.json")
    command = [sys.executable, "-X", "importtime", SOURCES / "gpt2.py", *command_line(tmp_path, run_type=run_type)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = set(re.findall(r"^import time:.*\|\s+([a-zA-Z_0-9]+)", done.stderr, flags=re.MULTILINE))
    assert needed in found and not found & slow


# The page that shows the rule.

PAGE = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
PICTURE = re.search(r"```text\n(.*?)```", PAGE, flags=re.DOTALL).group(1)


def test_the_picture_shows_the_floors():
    drawn = [line.split("|")[1].split(" · ") for line in PICTURE.splitlines() if "|" in line]
    assert [[room.strip() for room in floor] for floor in drawn] == [list(floor) for floor in FLOORS[::-1]]


def test_the_table_says_of_each_room_what_its_docstring_says():
    table = PAGE.split("| room | contents |\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    texts = [ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) for room in ROOMS]
    contents = [" ".join(text.split("\n\n", 1)[0].split()).replace("``", "`") for text in texts]
    assert table == [f"| `{room}` | {text} |" for room, text in zip(ROOMS, contents, strict=True)]
