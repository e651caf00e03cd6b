"""Imports between rooms have one direction, slow imports happen only where they are needed, and the page says so."""

import ast
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


def test_every_module_is_in_a_room():
    assert {path.relative_to(PACKAGE).parts[0] for path in modules()} == set(ROOMS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_follow_the_floors(path):
    own = ROOMS.index(path.relative_to(PACKAGE).parts[0])
    for name in imported(path):
        if name.startswith("dsgpt."):
            assert name.split(".")[1] in ROOMS[: own + 1], f"{ROOMS[own]} imports {name}"


def test_a_room_itself_imports_nothing():
    for path in PACKAGE.rglob("__init__.py"):
        assert [type(node) for node in ast.parse(path.read_text(encoding="utf-8")).body] == [ast.Expr], path


FOUNDATIONS = {
    "common": sorted(path.stem for path in (PACKAGE / "common").glob("*.py")),
    "config": ["options", "recipe", "recipe_blocks"],
    "machine": ["topology"],
}
"""Pydantic takes 0.1 s to import, and DeepSpeed brings it along anyway."""


@pytest.mark.parametrize("room", FOUNDATIONS)
def test_foundations_need_nothing_but_the_standard_library_and_pydantic(room):
    for module in FOUNDATIONS[room]:
        outside = {name.split(".")[0] for name in imported(PACKAGE / room / f"{module}.py")}
        assert outside <= sys.stdlib_module_names | {"dsgpt", "pydantic"}, module


def test_nothing_in_the_package_imports_a_script():
    scripts = {path.stem for folder in ("src", "charts", "data_prep") for path in (REPOSITORY / folder).glob("*.py")}
    assert {"gpt2", "generate", "generate_charts", "preprocess"} <= scripts
    for path in modules():
        assert not {name.split(".")[0] for name in imported(path)} & scripts


@pytest.mark.parametrize(
    ("library", "folders"),
    [("deepspeed", {"src/dsgpt/strategies/deepspeed"}), ("streamlit", {"src/dsgpt/dashboard", "charts"})],
)
def test_only_its_folder_imports_a_library(library, folders):
    files = [path for top in ("src", "charts", "data_prep") for path in (REPOSITORY / top).rglob("*.py")]
    users = {path for path in files if any(name.split(".")[0] == library for name in imported(path))}
    assert {path.parent.relative_to(REPOSITORY).as_posix() for path in users} == folders


def imported_by(*arguments: object, cwd: Path) -> set[str]:
    """Top-level packages that a command really imports, as ``python -X importtime`` lists them."""
    command = [sys.executable, "-X", "importtime", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return set(re.findall(r"^import time:.*\|\s+([a-zA-Z_0-9]+)", done.stderr, flags=re.MULTILINE))


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


def test_baseline_trains_without_deepspeed(tmp_path):
    write_recipe(write_data(tmp_path) / "recipe.json")
    found = imported_by(SOURCES / "gpt2.py", *command_line(tmp_path), cwd=tmp_path)
    assert (tmp_path / "run" / "RUN_COMPLETE.txt").exists()
    assert "torch" in found
    assert not found & {"deepspeed", *(package for packages in PACKAGES.values() for package in packages)}


def test_zero_starts_without_the_compiler(tmp_path):
    """DeepSpeed would import Inductor to check whether the optimizer is Muon, which takes each rank about 2 s."""
    write_recipe(write_data(tmp_path) / "recipe.json", zero_optimization={"stage": 1})
    found = imported_by(SOURCES / "gpt2.py", *command_line(tmp_path, run_type="optimized"), cwd=tmp_path)
    assert (tmp_path / "run" / "RUN_COMPLETE.txt").exists()
    assert "deepspeed" in found
    assert not found & {"functorch", "jinja2", "networkx"}


# The page that shows the rule.

PAGE = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
PICTURE = re.search(r"```text\n(.*?)```", PAGE, flags=re.DOTALL).group(1)


def test_the_picture_shows_the_floors():
    drawn = [line.split("|")[1].split(" · ") for line in PICTURE.splitlines() if "|" in line]
    assert [[room.strip() for room in floor] for floor in drawn] == [list(floor) for floor in FLOORS[::-1]]


def test_the_table_says_of_each_room_what_its_docstring_says():
    table = PAGE.split("| room | contents |\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    assert table == [f"| `{room}` | {summary(room)} |" for room in ROOMS]


def summary(room: str) -> str:
    """The first paragraph of the room's docstring, as a page writes it."""
    place = PACKAGE.joinpath(*room.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n", 1)[0].split()).replace("``", "`")


def test_the_way_of_a_run_names_modules_that_exist():
    way = re.search(r"^    src/gpt2\.py\n((?:      .*\n)+)", PAGE, flags=re.MULTILINE).group(1)
    modules = re.findall(r"(?:^ +|-> )([a-z_]+\.[a-z_]+)\b", way, flags=re.MULTILINE)
    assert len(modules) >= 8
    for module in modules:
        place = PACKAGE.joinpath(*module.split("."))
        assert place.with_suffix(".py").exists() or place.parent.with_suffix(".py").exists(), module


WALKS = {
    "add a strategy": {
        "strategies/pytorch.py": r"^class \w+\(TorchStrategy\)",
        "strategies/base.py": r"^def build_strategy\(",
        "config/compatibility.py": r"problems\.add\(",
        "planner/strategies.py": r"^class \w+\(Planned\)",
    },
    "change the loss": {"model/linear_cross_entropy.py": r"^def linear_cross_entropy\("},
    "add a figure to the record": {
        "training/journal.py": r"^class Journal\b",
        "record/schema.py": r"^SCHEMA_VERSION = ",
        "record/runs.py": r"^class Run\b",
    },
    "add a chart": {
        "charts/runs.py": r"^def \w+\(",
        "charts/sweeps.py": r"^def \w+\(",
        "charts/command.py": r"^RUN_CHARTS = ",
    },
    "add a GPU": {"planner/hardware.json": r'"datasheet|"source'},
    "add a suite": {"src/benchmark.py": r"^SUITES\b"},
}
"""Each of the six questions that are asked most: the files that the page names, and what a reader finds in each."""
ANSWERS = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.split("asked most:", 1)[1], flags=re.MULTILINE)[1:7])


def test_the_page_answers_six_questions():
    assert list(ANSWERS) == list(WALKS)


@pytest.mark.parametrize("question", WALKS)
def test_an_answer_leads_to_its_place(question):
    for file, words in WALKS[question].items():
        assert f"`{file}" in ANSWERS[question], file
        place = PACKAGE / file if (PACKAGE / file).exists() else REPOSITORY / file
        assert re.search(words, place.read_text(encoding="utf-8"), flags=re.MULTILINE), file


def test_the_tables_of_strategies_and_suites_name_every_one():
    """So the last step of two answers cannot be forgotten."""
    strategies = (PACKAGE / "strategies").rglob("*.py")
    classes = {name for path in strategies for name in re.findall(r"^class (\w+)\(", path.read_text(), re.MULTILINE)}
    named = set(re.findall(r'"([A-Z]\w+)"', (PACKAGE / "strategies" / "base.py").read_text()))
    assert named >= {"Baseline", "Ddp", "Fsdp", "Zero", "TensorParallel", "SequenceParallel", "PipelineParallel"}
    assert named <= classes
    suites = [path.read_text(encoding="utf-8") for path in (PACKAGE / "benchmarks").glob("*.py")]
    found = {name for text in suites for name in re.findall(r"^class (\w+)\((?:frame\.)?Suite\[", text, re.MULTILINE)}
    assert found
    assert found <= set(re.findall(r"\w+", (SOURCES / "benchmark.py").read_text(encoding="utf-8")))
