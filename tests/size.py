"""``make size``: how much code there is, beside what is allowed.

A code line is not blank, no comment and no part of a docstring. Needs only the standard library.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
SHORT = 6
"""Lines of a function that may be too small for a name."""
ADDED = {"src": 2_500 + 1_200 + 900 + 1_500 + 2_000, "tests": 1_500 + 1_300 + 700 + 1_200 + 1_000}
"""Lines for several machines, for a GPU that is rehearsed and proven, for the planner's exam, for data at scale, and
for proofs by others' bugs and programs; a file per 150."""
LIMITS = {
    "src: code lines": 30_000 + ADDED["src"],
    "src: files": 150 + ADDED["src"] // 150,
    "tests: code lines": 17_200 + ADDED["tests"],
    "tests: files": 115 + ADDED["tests"] // 150,
    "folders directly under src/dsgpt": 16,
    "folders under src/dsgpt, inner ones too": 20,
    f"functions of at most {SHORT} lines whose name stands exactly once more in src": 120,
}


def code_lines(path: Path) -> int:
    """The code lines of a Python file."""
    text = path.read_text(encoding="utf-8")
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    texts = text.splitlines()
    return sum(bool(texts[number - 1].strip()) for number in lines)


def used_once(paths: list[Path]) -> int:
    """How many functions have at most ``SHORT`` lines and a name that stands exactly once more."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    names = Counter(word for text in texts for word in re.findall(r"\w+", text))
    functions = (node for text in texts for node in ast.walk(ast.parse(text)))
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno < SHORT
        and names[node.name] == 2
        for node in functions
    )


def counts() -> Iterator[int]:
    """The numbers, in the order of ``LIMITS``."""
    for folder in ("src", "tests"):
        paths = sorted((REPOSITORY / folder).rglob("*.py"))
        yield sum(code_lines(path) for path in paths)
        yield len(paths)
    rooms = [path.parent for path in (REPOSITORY / "src" / "dsgpt").rglob("__init__.py")][1:]
    package = REPOSITORY / "src" / "dsgpt"
    yield sum(room.parent == package for room in rooms)
    yield len(rooms)
    yield used_once(sorted((REPOSITORY / "src").rglob("*.py")))


def main() -> int:
    """Print a line for each number; return 0."""
    width = max(map(len, LIMITS))
    print(f"{'':{width}}    now  at most")
    for (name, limit), now in zip(LIMITS.items(), counts(), strict=True):
        print(f"{name:{width}} {now:6,} {limit:8,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
