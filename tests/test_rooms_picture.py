"""The picture of the rooms in ``docs/ARCHITECTURE.md`` shows the import rule."""

import ast
import re

from small_run import REPOSITORY
from test_import_rule import PACKAGE, ROOMS

PAGE = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
PICTURE = re.search(r"```mermaid\n(.*?)```", PAGE, flags=re.DOTALL).group(1)
ARROWS = set(re.findall(r"^ +(\S+) --> (\S+)$", PICTURE, flags=re.MULTILINE))


def below(room: str, arrows: set[tuple[str, str]]) -> set[str]:
    """The rooms that a path of arrows leads to."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = {target for source, target in arrows if source == waiting[-1]} - found
        waiting.pop()
        found |= new
        waiting += new
    return found


def needed(allowed: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows without which a room would no longer be below another (the transitive reduction)."""
    return {(source, target) for source, target in allowed if target not in below(source, allowed - {(source, target)})}


def test_every_room_is_in_the_picture():
    assert {room for arrow in ARROWS for room in arrow} == ROOMS.keys()


def test_the_table_says_of_each_room_what_its_docstring_says():
    table = PAGE.split("| room | contents |\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    assert table == [f"| `{room}` | {summary(room)} |" for room in ROOMS]


def summary(room: str) -> str:
    """The first paragraph of the room's docstring, as a page writes it."""
    place = PACKAGE.joinpath(*room.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n", 1)[0].split()).replace("``", "`")


def test_the_arrows_are_those_of_the_import_rule():
    """If it fails, put the lines that the message names into the page, or take them out."""
    allowed = {(room, other) for room, others in ROOMS.items() for other in others if other != room}
    assert needed(allowed) == ARROWS
    assert len(PICTURE.splitlines()) == 1 + len(ARROWS)


def test_the_way_of_a_run_names_modules_that_exist():
    way = re.search(r"^    src/gpt2\.py\n((?:      .*\n)+)", PAGE, flags=re.MULTILINE).group(1)
    modules = re.findall(r"(?:^ +|-> )([a-z_]+\.[a-z_]+)\b", way, flags=re.MULTILINE)
    assert len(modules) >= 8
    for module in modules:
        place = PACKAGE.joinpath(*module.split("."))
        assert place.with_suffix(".py").exists() or place.parent.with_suffix(".py").exists(), module
