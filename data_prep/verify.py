"""Read token files, and compare them with what is noted beside them; see --help."""

from collections.abc import Sequence
from pathlib import Path

from dsgpt.common.command_line import run_script
from dsgpt.data.verify import Contents, main


def draw(contents: Sequence[Contents], picture: Path) -> None:
    """Draw what the files hold."""
    from dsgpt.charts.token_files import draw_contents  # noqa: PLC0415 - Matplotlib takes seconds; --help should not

    draw_contents(contents, picture)


if __name__ == "__main__":
    run_script(lambda: main(draw=draw))
