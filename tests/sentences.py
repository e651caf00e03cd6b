"""``make style``: sentences of more than 35 words in pages, docstrings, comments, helps and messages.

A sentence ends with a full stop, a question mark or an exclamation mark; items of lists are sentences of their own.
Tables, code and layouts are left out, and so are strings of the tests. Needs only the standard library.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LONGEST = 35
"""Words of a sentence."""
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*(\[0-9\"]|$)")
"""Between sentences."""
_LAYOUT = re.compile(r"^ .*", re.MULTILINE)
"""Lines that begin with a space, of a comment or a text in code."""


def sentences(prose: str) -> Iterator[str]:
    """The sentences of a paragraph; code and a link's target count as one word."""
    text = re.sub(r"\]\([^)]*\)", "]", prose).replace(" · ", ". ")
    text = re.sub(r"(`+).+?\1", "`code`", text, flags=re.DOTALL)
    text = re.sub(r"\{[^{}]*\}", "1", text)  # the field of a page that is filled
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


def paragraphs_of_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each paragraph, argument and item of a list of each docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            line = node.lineno
            prose, _, examples = node.value.value.partition(" Examples:\n")
            prose += re.sub(rf"^ {{{node.col_offset + 1},}}.*", "", examples, flags=re.MULTILINE)
            for part in re.split(r"\n\s*\n|\n(?=\s*(?:\w+:|[*-]) )", prose):
                if not part.startswith(" " * (node.col_offset + 4)):  # else a layout or an example
                    yield line, part
                line += part.count("\n") + 2


def paragraphs_of_comments(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each paragraph of the comments that have lines of their own."""
    for block in re.finditer(r"(?:^ *#.*\n)+", text, flags=re.MULTILINE):
        prose = re.sub(r"^ *#!? ?", "", block[0], flags=re.MULTILINE)
        for line, paragraph in paragraphs_of_page(_LAYOUT.sub("", prose)):
            yield text.count("\n", 0, block.start()) + line, paragraph


def paragraphs_of_strings(text: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each paragraph of the other strings: helps, messages and pages. A value is one word."""
    nodes = [*ast.walk(ast.parse(text))]
    parts = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        values = node.values if isinstance(node, ast.JoinedStr) else [node]
        words = [str(value.value) if isinstance(value, ast.Constant) else "value" for value in values]
        if node not in parts and isinstance(node, ast.Constant | ast.JoinedStr):
            for line, paragraph in paragraphs_of_page(_LAYOUT.sub("", "".join(words))):
                yield node.lineno + line - 1, paragraph


def paragraphs(path: Path) -> Iterator[tuple[int, str]]:
    """Line number and text of everything in a file that is read as sentences."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from paragraphs_of_page(text)
    else:
        yield from paragraphs_of_docstrings(text)
        yield from paragraphs_of_comments(text)
        if "tests" not in path.relative_to(REPOSITORY).parts:
            yield from paragraphs_of_strings(text)


def main() -> int:
    """Print every sentence that is too long, and their number; return 1 if there is one."""
    found = 0
    pages = ("*.md", "docs/*.md", "launch/*.md", "ds_configs/*.md", "src/dsgpt/**/*.md")
    code = ("src/**/*.py", "charts/*.py", "data_prep/*.py", "tests/**/*.py", "setup.py")
    for path in sorted(path for pattern in (*pages, *code) for path in REPOSITORY.glob(pattern)):
        for line, paragraph in paragraphs(path):
            for sentence in sentences(paragraph):
                words = len(sentence.split())
                if words > LONGEST:
                    found += 1
                    print(f"{path.relative_to(REPOSITORY)}:{line}: {words} words: {sentence}")
    print(f"sentences of more than {LONGEST} words: {found}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
