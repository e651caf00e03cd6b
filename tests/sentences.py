"""``make style``: sentences of more than 35 words in pages, docstrings and comments' texts. Standard library only."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LONGEST = 35
"""Words of a sentence."""
_END = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`*(\[0-9\"]|$)")
"""Between sentences; what stands before a colon or a semicolon can be read alone."""


def sentences(prose: str) -> Iterator[str]:
    """The sentences of a paragraph; code and a link's target count as one word."""
    text = re.sub(r"\]\([^)]*\)", "]", prose).replace(" · ", ". ")
    text = re.sub(r"(`+).+?\1", "`code`", text, flags=re.DOTALL)
    for sentence in _END.split(" ".join(text.split())):
        if any(character.isalpha() for character in sentence):
            yield sentence


def paragraphs_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each paragraph and list item; tables, code and headings are left out."""
    paragraph: list[str] = []
    begun, in_code = 0, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        in_code ^= line.lstrip().startswith("```")
        indented = line.startswith("    ") and not paragraph
        ends = in_code or indented or not line.strip() or line.lstrip().startswith(("```", "|", "#", "![", "<"))
        item = re.match(r"\s*([*-]|\d+\.)\s", line) is not None
        if (ends or item) and paragraph:
            yield begun, "\n".join(paragraph)
            paragraph = []
        if not ends:
            begun = begun if paragraph else number
            paragraph.append(re.sub(r"^\s*([*-]|\d+\.)\s", "", line))


def paragraphs_of_code(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each paragraph of each docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            line = node.lineno
            for part in re.split(r"\n\s*\n|\n(?=\s*\w+: )", node.value.value):
                if not part.startswith(" " * (node.col_offset + 4)):  # else a layout or an example
                    yield line, part
                line += part.count("\n") + 2


def main() -> int:
    """Print every sentence that is too long, and their number; return 1 if there is one."""
    found = 0
    for path in sorted({*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("ds_configs/*.md"),
                        *REPOSITORY.glob("src/**/*.py"), *REPOSITORY.glob("tests/**/*.py")}):  # fmt: skip
        parts = paragraphs_of_page if path.suffix == ".md" else paragraphs_of_code
        for line, paragraph in parts(path.read_text(encoding="utf-8")):
            for sentence in sentences(paragraph):
                words = len(sentence.split())
                if words > LONGEST:
                    found += 1
                    print(f"{path.relative_to(REPOSITORY)}:{line}: {words} words: {sentence}")
    print(f"sentences of more than {LONGEST} words: {found}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
