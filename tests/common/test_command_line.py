"""The command line of every script: all mistakes are noted, and words are read as argparse reads them."""

import pytest

from dsgpt.common.command_line import Parser, Reader, read_words
from dsgpt.common.errors import UserError


def read(*words: str) -> tuple[dict[str, object], list[str]]:
    """The values, and the mistakes."""
    reader = Reader()
    parser = Parser(description="For a test.")
    parser.add_argument("place", nargs="?")
    parser.add_argument("--text")
    parser.add_argument("--share", type=reader.share("--share"))
    parser.add_argument("--many", nargs="+")
    parser.add_argument("--kind", type=reader.choice("--kind", ("one", "two"), None))
    values = vars(read_words(parser, reader, words, elsewhere={"--size": "give --share"}))
    try:
        reader.problems.raise_if_any()
    except UserError as error:
        return values, list(error.problems)
    return values, []


@pytest.mark.parametrize("value", ["-", "-1", "-0.5", "- a text", "--a text", "x"])
def test_words_that_argparse_reads_as_values(value):
    assert read("--text", value) == ({"place": None, "text": value, "share": None, "many": None, "kind": None}, [])


def test_all_mistakes_are_noted(snapshot):
    values, mistakes = read(
        "here", "--text", "-x", "--many", "--kind", "tow", "--share", "1", "--texts=a", "--size", "3", "--zzz", "--text"
    )
    assert values["place"] == "here"
    assert mistakes == snapshot


def test_a_missing_argument_is_an_error():
    with pytest.raises(UserError, match="the following arguments are required: --text; see --help"):
        parser = Parser(description="For a test.")
        parser.add_argument("--text", required=True)
        read_words(parser, Reader(), [])
