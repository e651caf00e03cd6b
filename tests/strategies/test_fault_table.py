"""The table of DeepSpeed's faults in ``docs/ARCHITECTURE.md`` names files and functions that exist."""

import ast
import re

import pytest
from small_run import REPOSITORY

PACKAGE = REPOSITORY / "src" / "dsgpt"
PAGE = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("## What DeepSpeed 0.19.8 gets wrong") :]
PLACES = sorted(set(re.findall(r"`([\w/]+\.py)(?:: (\w+))?`", TABLE)))


def test_the_table_is_found():
    assert len(PLACES) > 12


@pytest.mark.parametrize(("file", "name"), PLACES)
def test_a_work_around_is_where_the_table_says(file, name):
    """A file without a folder is one of ``strategies/deepspeed``."""
    path = PACKAGE / file if "/" in file else PACKAGE / "strategies" / "deepspeed" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert not name or name in functions
