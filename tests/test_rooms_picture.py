"""The picture of the rooms in ``docs/ARCHITECTURE.md`` shows the import rule."""

import re

from small_run import REPOSITORY
from test_import_rule import ROOMS

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


def test_every_room_is_in_the_picture_and_in_the_table():
    assert {room for arrow in ARROWS for room in arrow} == ROOMS.keys()
    table = PAGE.split("| room | contents |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE)))) == set(ROOMS)


def test_the_arrows_are_those_of_the_import_rule():
    """If it fails, put the lines that the message names into the page, or take them out."""
    allowed = {(room, other) for room, others in ROOMS.items() for other in others if other != room}
    assert needed(allowed) == ARROWS
    assert len(PICTURE.splitlines()) == 1 + len(ARROWS)
