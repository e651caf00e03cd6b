"""Adds the flags of suites to a parser: those that several suites have."""

from pathlib import Path

from dsgpt.common.command_line import Parser, Reader


class SuiteFlags:
    """Adds flags to the parser of a command.

    Args:
        parser: of the command.
        reader: collects the mistakes.
    """

    def __init__(self, parser: Parser, reader: Reader) -> None:
        self.parser, self.reader = parser, reader

    def number(self, flag: str, *, default: int, text: str, low: int = 0) -> None:
        """A whole number of at least ``low``."""
        read = self.reader.whole(flag, low=low)
        self.parser.add_argument(flag, type=read, default=default, metavar="N", help=text)

    def only(self, metavar: str, what: str) -> None:
        """``--only``, which selects a part of the suite."""
        self.parser.add_argument(
            "--only", nargs="+", default=(), metavar=metavar, help=f"only these {what} (default: all)"
        )

    def peers(self, text: str) -> None:
        """``--peer``, the checkouts of other trainers."""
        self.parser.add_argument(
            "--peer",
            nargs="+",
            default=(),
            metavar="NAME=FOLDER",
            help=f"{text}: nanogpt=FOLDER, whose model.py is executed (default: Hugging Face only)",
        )

    def core(self, text: str) -> None:
        """``--core``, which selects what the tests run."""
        self.parser.add_argument("--core", action="store_true", help=text)

    def device(self, text: str) -> None:
        """``--device``."""
        read = self.reader.choice("--device", ("cpu", "cuda"), "cpu")
        self.parser.add_argument("--device", type=read, default="cpu", metavar="KIND", help=f"{text} (default: cpu)")

    def output(self, record: Path | None, *, shown: str) -> None:
        """``--output``, ``--page`` and ``--table-from``; ``shown`` is the default record in the help."""
        for flag, default, metavar, text in (
            ("--output", record, "RECORD", f"the record to write (default: {shown})"),
            ("--page", None, "MD", "the page to write (default: beside the record)"),
            ("--table-from", None, "RECORD", "run nothing; make the page from an earlier record"),
        ):
            self.parser.add_argument(flag, type=Path, default=default, metavar=metavar, help=text)

    def keep(self) -> None:
        """``--keep``."""
        self.parser.add_argument(
            "--keep",
            type=Path,
            default=None,
            metavar="DIR",
            help="leave recipes, logs and measurements of every training there",
        )
