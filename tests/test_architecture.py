"""Imports between rooms have one direction, slow imports happen only where they are needed, and the page says so."""

import ast
import functools
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import REPOSITORY, command_line

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
        outside = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names
        assert outside <= {"dsgpt", "pydantic"}, path


def test_a_room_itself_imports_nothing():
    for path in PACKAGE.rglob("__init__.py"):
        assert [type(node) for node in ast.parse(path.read_text(encoding="utf-8")).body] == [ast.Expr], path


@pytest.mark.parametrize(
    ("library", "folders"),
    [
        ("deepspeed", {"src/dsgpt/strategies/deepspeed", "src/dsgpt/benchmarks/oracles.py"}),  # as a program of others
        ("streamlit", {"src/dsgpt/dashboard", "charts"}),
    ],
)
def test_only_its_folder_imports_a_library(library, folders):
    files = [path for top in ("src", "charts", "data_prep") for path in (REPOSITORY / top).rglob("*.py")]
    users = {path for path in files if any(name.split(".")[0] == library for name in imported(path))}
    names = {path.relative_to(REPOSITORY) for path in users}
    assert {name.as_posix() if name.as_posix() in folders else name.parent.as_posix() for name in names} == folders


BRING_TORCH = {"torch", "deepspeed", "transformers", "lm_eval", "safetensors.torch"}
TORCH = {
    "benchmarks": "clusters_runs contenders faults_kinds faults_machine parity_rank parity_reference plan_rank "
    "stand_in_gpu",
    "checkpoints": "pieces training_state",
    "data": "loader",
    "formats": "foreign_weights hugging_face tensor_files",
    "inference": "decoder evaluate generation model_files server.completions server.engine server.server",
    "machine": "device peers spot",
    "model": "gpt2 linear_cross_entropy",
    "planner": "calibrate",
    "strategies": "base exact pytorch deepspeed.engine deepspeed.pipeline deepspeed.setup deepspeed.state "
    "deepspeed.tensor_layers deepspeed.zero",
    "telemetry": "cost meter profiles",
    "training": "budget invariants journal run run_description run_folder saving trackers trainer",
}
"""The files of each room whose import imports torch. Everything else can be used without waiting for it."""


def imported_at_once(path: Path) -> set[str]:
    """What the import of a file imports: not what stands in functions, and not what only a type checker reads."""
    names, nodes = set(), [*ast.parse(path.read_text(encoding="utf-8")).body]
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)
    return {part for name in names for part in itertools.accumulate(name.split("."), "{}.{}".format)}


def test_torch_is_imported_only_behind_the_wall():
    names = {".".join(path.relative_to(SOURCES).with_suffix("").parts): imported_at_once(path) for path in modules()}
    found, behind = BRING_TORCH, set[str]()
    while found:
        behind |= found
        found = {module for module, used in names.items() if used & behind} - behind
    assert behind - BRING_TORCH == {f"dsgpt.{room}.{name}" for room, files in TORCH.items() for name in files.split()}
    assert {*ROOMS} - {name.split(".")[1] for name in names.keys() - behind} == {"strategies"}


@pytest.mark.parametrize(
    ("modules", "slow"),
    [
        (["generate"], {"torch", "numpy", "pydantic"}),
        (["benchmark", "plan", "dsgpt.config.run_config", "dsgpt.record.runs"], {"torch", "numpy", "transformers"}),
        (["dsgpt.data.download", "dsgpt.data.preparation"], {"torch", "transformers", "datasets", "pyarrow"}),
        ([f"dsgpt.dashboard.{name}" for name in ("overview", "compare", "live")], {"torch", "matplotlib", "seaborn"}),
    ],
    ids=["generate", "the others", "preparation of text", "pages of runs"],
)
def test_light_modules_import_nothing_slow(modules, slow):
    code = "import importlib, sys\n"
    code += f"for name in {modules}: print(name, importlib.import_module(name) and {slow} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=SOURCES, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} set()" for name in modules]


@pytest.mark.parametrize(
    ("run_type", "needed", "slow"),
    [("baseline", "torch", {"deepspeed", *sum(PACKAGES.values(), ())}),
     ("optimized", "deepspeed", {"functorch", "jinja2", "networkx", "mlflow.version"})],
)  # fmt: skip
def test_a_training_imports_nothing_slow(here, run_type, needed, slow):
    """Left to itself, DeepSpeed imports Inductor, for an optimizer, and MLflow, for its autotuner: about 2 s each."""
    command = [sys.executable, "-X", "importtime", SOURCES / "gpt2.py", *command_line(here, run_type=run_type)]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Setting accelerator" not in done.stdout + done.stderr  # DeepSpeed chooses, whatever --device says
    found = set(re.findall(r"^import time:.*\|\s+([\w.]+)", done.stderr, flags=re.MULTILINE))
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


def test_the_way_of_a_run_names_modules_that_exist():
    way = re.search(r"^    src/gpt2\.py\n((?:      .*\n)+)", PAGE, flags=re.MULTILINE)[1]
    names = re.findall(r"(?:^ +|-> )([a-z_]+\.[a-z_]+)\b", way, flags=re.MULTILINE)
    assert len(names) >= 8
    assert [name for name in names if not (PACKAGE / name.replace(".", "/")).with_suffix(".py").exists()] == []


@pytest.mark.parametrize(
    ("room", "begins", "file", "one"),
    [("strategies", r"class (\w+)(?<!Strategy)\((?:\w+Strategy|Zero)\):", "dsgpt/strategies/base.py", "Zero"),
     ("benchmarks", r"class (\w+)\((?:frame\.)?Suite\[", "dsgpt/benchmarks/suites.py", "Parity")],
)  # fmt: skip
def test_every_strategy_and_suite_is_named_where_it_is_chosen(room, begins, file, one):
    texts = [path.read_text(encoding="utf-8") for path in (PACKAGE / room).rglob("*.py")]
    classes = {name for text in texts for name in re.findall(f"^{begins}", text, flags=re.MULTILINE)}
    assert one in classes
    assert classes - set(re.findall(r"\w+", (SOURCES / file).read_text(encoding="utf-8"))) == set()
