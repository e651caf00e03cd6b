"""The one command line: all mistakes are noted, and the words are read as argparse reads them."""

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


@pytest.mark.parametrize("value", ["-", "-1", "-0.5", "- a text", "x"])
def test_what_argparse_takes_for_a_value_is_one(value):
    assert read("--text", value) == ({"place": None, "text": value, "share": None, "many": None, "kind": None}, [])


def test_all_mistakes_are_noted():
    values, mistakes = read(
        "here", "--text", "-x", "--many", "--kind", "tow", "--share", "1", "--texts=a", "--size", "3", "--zzz", "--text"
    )
    assert values["place"] == "here"
    assert mistakes == [
        "--text needs a value",
        "--many needs a value",
        "--kind must be one of one, two, not tow (did you mean two?)",
        "--share must be a number above 0 and below 1, such as 0.05, not 1",
        "-x is not a known flag; see --help",
        "--texts is not a known flag (did you mean --text?)",
        "--size is not a known flag: give --share",
        "--zzz is not a known flag; see --help",
    ]


def test_what_argparse_cannot_read_is_an_error():
    with pytest.raises(UserError, match="the following arguments are required: --text; see --help"):
        parser = Parser(description="For a test.")
        parser.add_argument("--text", required=True)
        read_words(parser, Reader(), [])
