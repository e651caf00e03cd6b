"""The dependencies that pyproject.toml names are those that the code imports, and requirements.txt pins each."""

import ast
import re
import sys
import tomllib

from small_run import REPOSITORY

NAMES = {"pynvml": "nvidia-ml-py"}
"""Packages that are installed under another name than they are imported."""
FOLDERS = ("src", "charts", "data_prep")


def imported() -> set[str]:
    """Packages from outside that any file imports, at its top or inside a function."""
    found: set[str] = set()
    for path in (path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return {NAMES.get(name, name) for name in found} - sys.stdlib_module_names - {"dsgpt"}


def test_imported_packages_are_dependencies_with_exact_versions():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8")
    assert imported() == set(project["project"]["dependencies"])
    assert imported() <= set(re.findall(r"^([\w-]+)==[\d.]+$", requirements, flags=re.MULTILINE))
