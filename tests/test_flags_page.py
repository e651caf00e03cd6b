"""docs/flags.md says what the commands declare: every flag, its default and, for training, its meaning for equal work.

``pytest tests/test_flags_page.py --snapshot-update`` writes the page anew.
"""

from dataclasses import fields

import pytest
from small_run import REPOSITORY

from dsgpt.benchmarks.suites import COMMANDS, parser_of
from dsgpt.charts.generate import ChartsOptions
from dsgpt.common.command_line import Parser
from dsgpt.config.options import ChangesTraining, Options
from dsgpt.dashboard.server import DashboardOptions
from dsgpt.data.download import DownloadOptions
from dsgpt.data.exchange import ConvertDataOptions
from dsgpt.data.preparation import PrepareOptions
from dsgpt.data.verify import VerifyOptions
from dsgpt.demo import Demo
from dsgpt.inference.commands import ConvertOptions, EvaluateRequest, GenerateRequest, ServeOptions
from dsgpt.planner.options import PlanOptions
from dsgpt.record.readings import WhereOptions
from dsgpt.training.doctor import DoctorOptions

PAGE = REPOSITORY / "docs" / "flags.md"
BEGINNING = """\
# Every flag

Each command prints this with `--help`, beside examples. This page is made from what the commands declare; for training
it adds what a flag means for equal work. A flag "counts" if it changes the training: the charts compare these facts.
Otherwise it says why it may differ. `--num_documents` is a flag of `data_prep/preprocess_small.py` alone.
"""
TRAINING = "src/gpt2.py"


def _parser(options: type) -> Parser:
    parser = Parser(description="")
    parser.add_flags(options)
    return parser


def _section(command: str, parser: Parser) -> str:
    works = {f"--{field.name}": field.metadata["work"] for field in fields(Options)} if command == TRAINING else {}
    parser.format_help()
    lines = [f"## {command}", "", f"| flag | |{' equal work |' * bool(works)}", f"|---|---|{'---|' * bool(works)}"]
    for action in parser._actions:
        if action.dest in {"help", "what"}:
            continue
        name, metavar = "".join(action.option_strings), action.metavar or ""
        cells = [f"`{f'{name} {metavar}'.strip()}`", action.help % vars(action)]
        if works:
            work = works[name]
            cells.append(f"counts: {', '.join(work.facts)}" if isinstance(work, ChangesTraining) else work.why)
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join([*lines, ""])


def flags_page() -> str:
    commands = {
        "data_prep/preprocess.py, preprocess_small.py": PrepareOptions,
        "data_prep/download_data.py": DownloadOptions,
        "data_prep/verify.py": VerifyOptions,
        "data_prep/exchange.py": ConvertDataOptions,
        "data_prep/where.py": WhereOptions,
        TRAINING: Options,
        "src/doctor.py": DoctorOptions,
        "src/plan.py": PlanOptions,
        "src/generate.py": GenerateRequest,
        "src/evaluate.py": EvaluateRequest,
        "src/serve.py": ServeOptions,
        "src/convert.py": ConvertOptions,
        "charts/generate_charts.py": ChartsOptions,
        "charts/dashboard.py": DashboardOptions,
        "src/demo.py": Demo,
    }
    parsers = {command: _parser(options) for command, options in commands.items()}
    parsers |= {f"src/benchmark.py {what}": parser_of(what) for what in COMMANDS}
    return "\n".join([BEGINNING, *(_section(command, parser) for command, parser in parsers.items())])


def test_the_page_says_what_the_commands_declare(request: pytest.FixtureRequest):
    if request.config.getoption("update_snapshots"):
        PAGE.write_text(flags_page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == flags_page()
