"""The picture of the rooms in ``docs/ARCHITECTURE.md`` shows the import rule."""

import ast
import re

from small_run import REPOSITORY
from test_import_rule import FLOORS, PACKAGE, ROOMS

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
