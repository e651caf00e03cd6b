"""``benchmark.py mutants``: change the code that decides a step or a resume in one place, and see which test fails.

Mutants are made with ``ast``. The tool cosmic-ray has no operators for collectives and ranks, changes the user's own
checkout, and starts a Python for each mutant, which imports torch and DeepSpeed. The tool mutmut forks, but it calls
each function through a switch, and finds no test of a line that only a forked rank executes.
"""

import ast
import contextlib
import ctypes
import importlib
import importlib.util
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.launch import IMPORTS, child_environment
from dsgpt.common.command_line import COUNT, POSITIVE, flag, switch
from dsgpt.common.errors import UserError
from dsgpt.common.files import remove, sha256_of, write_json_atomic
from dsgpt.common.json_files import JsonError, read_object
from dsgpt.common.text import bullets

FILES = (
    *(f"strategies/{name}.py" for name in ("base", "pytorch")),
    *(f"strategies/deepspeed/{name}.py" for name in ("engine", "zero", "pipeline", "tensor_layers", "state", "setup")),
    *("model/gpt2.py", "model/linear_cross_entropy.py", "data/order.py", "data/loader.py"),
    *("config/run_config.py", "machine/topology.py", "training/run_folder.py", "training/trainer.py"),
    *(f"checkpoints/{name}.py" for name in ("pieces", "training_state", "store", "manifest")),
)
"""Files that decide what a step computes or what a resume restores, below ``src/dsgpt``."""
TESTS = (
    *("model/test_model.py", "model/test_documents.py", "data/test_tokens.py", "data/test_token_reader.py"),
    "data/test_data_set.py",
    *("config/test_config.py", "config/test_recipe.py", "machine/test_processes.py"),
    *("checkpoints/test_pieces.py", "checkpoints/test_store.py", "checkpoints/test_host_copies.py"),
    *("strategies/test_optimizer.py", "strategies/test_setup.py", "strategies/test_vocabulary_parallel.py"),
    *(f"training/test_{name}.py" for name in ("resume", "run_folder", "saving", "loss_scaling", "changed", "journal")),
    *(f"training/test_{name}.py" for name in ("invariants", "goodput", "observed_runs")),
    *(
        "goldens/test_runs.py",
        "goldens/test_old_checkpoints.py",
        "strategies/test_exact.py",
        "strategies/test_costs.py",
    ),
    *("clusters/test_elastic.py", "telemetry/test_measured.py", "inference/test_init_from.py"),
    *("goldens/test_golden_words.py", "inference/test_export.py", "inference/test_generate.py"),
    *("clusters/test_launching.py", "config/test_compatibility.py"),
)
"""Tests that are tried on each mutant whose line they execute, below ``tests``."""
SLOW_TESTS = ("strategies/test_exact.py", "strategies/test_on_ranks.py", "benchmarks/test_parity_core.py")
"""Tests of all strategies, which share launches: they are tried on what survives the others."""
ABOUT = {"pipeline": "pipeline", "tensor_layers": "tensor", "pytorch": "ddp or fsdp or baseline"}
ABOUT |= {"zero": "zero or tensor or sequence"}
"""Module to the word that selects the ``SLOW_TESTS`` of what it does; all, if it is not here."""
WARM = (*IMPORTS["torchrun"], *IMPORTS["deepspeed"], "transformers", "pytest")
"""Modules that are imported once, and not for each mutant."""
PYTEST_WORDS = ("-q", "-p", "no:cacheprovider", "--snapshot-warn-unused")
"""Of every command line: snapshots that nothing used would be a failure, as of tests that are only collected."""
MUTANTS, SEED = 320, 28
MOST = {False: (40, 90), True: (200, 240)}
"""Tests that are tried on a mutant, and on a survivor, and how long they take together without it, in seconds."""
START_SEC, SLOW_SEC = 60, 240
LOOK_SEC, WAIT = 2, 3
"""Seconds between looks at the time that processes have used, and how much longer they may wait for each other."""
CONTROLS = 5
"""How often a mutant is tried, if tests fail that also fail without it."""
REASONS = ("equivalent: ", "invisible to users: ")
"""How the reason for a survivor begins."""
JUDGED = Path(__file__).with_name("mutants.json")
"""Reasons for survivors, by their ``name``: written by a person."""

# Mutants of a file.

COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
COMPUTED |= {ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
_SWAPS = (
    *(("rank", "data_rank"), ("tensor_rank", "sequence_rank"), ("world_size", "data_parallel_size")),
    *(("local_rank", "rank"), ("get_rank", "get_world_size"), ("exp_avg", "exp_avg_sq")),
)
SWAPPED = {one: other for pair in _SWAPS for one, other in (pair, pair[::-1])}
COLLECTIVES = {"all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier"}
COLLECTIVES |= {"reduce_scatter_tensor", "broadcast_object_list", "sum_over_ranks", "gather_objects", "from_main"}
READ = {"add", "say", "info", "warning", "debug", "log", "print", "warn"}
"""Calls that only print, or report a mistake."""
UNSWAPPED = {"min", "max", "isinstance", "getattr", "setattr", "hasattr", "next", "partial"}
UNSWAPPED |= {"__init__", "save_for_backward"}
"""Calls whose arguments can be swapped without an effect, or never."""
TEXT = (ast.Constant, ast.JoinedStr)
TESTED = (ast.Compare, ast.UnaryOp, ast.Constant)
"""Conditions that other operators change."""
NOT_MUTATED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.match_case)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str
    function: str
    operator: str
    before: str
    after: str
    number: int
    """Counts equal changes of a function, from 1."""
    line: int
    lines: tuple[int, int]
    """First and last line of the statement, without the statements inside it."""
    place: tuple[int, int]
    """First byte and end in the file."""

    @property
    def name(self) -> str:
        """The same after changes elsewhere in the file."""
        ordinal = f" ({self.number})" if self.number > 1 else ""
        return " ".join(f"{self.file}: {self.function or 'module'}: {self.before} -> {self.after}{ordinal}".split())

    def of(self, source: bytes) -> bytes:
        """The whole file with the change."""
        return source[: self.place[0]] + self.after.encode() + source[self.place[1] :]


def _called(node: ast.AST) -> str:
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:  # noqa: PLR0912 - one case for each operator
    """The operator, the node that it replaces, and by what."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right):
            yield "comparison", node, ast.unparse(ast.Compare(left, [COMPARED[type(op)]()], right))
        case ast.BinOp(op=ast.Div(), right=right) if isinstance(right, TEXT) or ast.unparse(right).isupper():
            return  # a path
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
            yield "arithmetic", node, ast.unparse(ast.BinOp(left, COMPUTED[type(op)](), right))
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield "arithmetic" if isinstance(node.op, ast.USub) else "condition", node, ast.unparse(operand)
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in COMPUTED:
            yield "arithmetic", node, ast.unparse(ast.AugAssign(target, COMPUTED[type(op)](), value))
            yield "statement left out", node, "pass"
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "condition", node, ast.unparse(ast.BoolOp(other, values))
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, TESTED):
            yield "condition", test, f"not ({ast.unparse(test)})"
        case ast.Constant(value=bool()):
            yield "constant", node, str(not node.value)
        case ast.Constant(value=int() | float() as number):
            yield "constant", node, repr(number + 1 if isinstance(number, int) or not number else 2 * number)
        case ast.Expr(value=ast.Call()):
            yield "collective" if _called(node.value) in COLLECTIVES else "statement left out", node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement left out", node, "pass"
        case ast.Attribute(value=value, attr=attr) if attr in SWAPPED:
            yield "rank", node, ast.unparse(ast.Attribute(value, SWAPPED[attr]))
        case ast.Attribute(value=value, attr="SUM"):
            yield "collective", node, ast.unparse(ast.Attribute(value, "MAX"))
        case ast.Name(id="min" | "max"):
            yield "arithmetic", node, "max" if node.id == "min" else "min"
        case ast.Call(func=function, args=words, keywords=named):
            if any(one.arg == "group" for one in named):
                others = [one for one in named if one.arg != "group"]
                yield "collective", node, ast.unparse(ast.Call(function, words, others))
            if len(words) > 1 and ast.dump(words[0]) != ast.dump(words[1]) and _called(node) not in UNSWAPPED:
                swapped = [words[1], words[0], *words[2:]]
                yield "arguments swapped", node, ast.unparse(ast.Call(function, swapped, named))


def mutants_of(source: bytes, *, file: str) -> list[Mutant]:
    """Every mutant of a file, in no order. Annotations, decorators, and what only a reader sees, have none."""
    starts, found, seen = [0], list[Mutant](), Counter[str]()
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    stack: list[tuple[ast.AST, str, tuple[int, int]]] = [(ast.parse(source), "", (0, 0))]
    while stack:
        node, function, lines = stack.pop()
        inside: Iterator[ast.AST] = ast.iter_child_nodes(node)
        match node:
            case ast.Expr(value=ast.Constant()) | ast.arguments() | ast.Slice(step=ast.Constant()):
                continue
            case ast.Expr(value=ast.Call()) if _called(node.value) in READ:
                continue
            case ast.FunctionDef() | ast.ClassDef():
                function, inside = f"{function}.{node.name}".lstrip("."), iter(node.body)
            case ast.AnnAssign():
                inside = iter([node.value] if node.value else [])
        if isinstance(node, NOT_MUTATED):
            continue
        if isinstance(node, ast.stmt):
            last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno or node.lineno
            lines = (node.lineno, max(last, node.lineno))
        for operator, target, words in _changes(node):
            at: Any = target
            place = starts[at.lineno - 1] + at.col_offset, starts[at.end_lineno - 1] + at.end_col_offset
            before = source[slice(*place)].decode()
            after = words if isinstance(at, ast.stmt | ast.Constant | ast.Name) else f"({words})"
            seen[key := f"{function}: {before} -> {after}"] += 1
            change: Any = {"operator": operator, "before": before, "after": after, "number": seen[key]}
            found.append(Mutant(file=file, function=function, line=at.lineno, lines=lines, place=place, **change))
        stack += [(each, function, lines) for each in reversed([*inside])]
    return found


def sample(sources: Mapping[str, bytes], *, count: int, seed: int) -> list[Mutant]:
    """About ``count`` mutants, the same for the same seed: of each file in proportion to its number, at least one.

    In a file the operators take turns, so that the rare ones, as those of collectives, are tried as well.
    """
    every = {file: mutants_of(source, file=file) for file, source in sources.items()}
    whole, chosen = sum(map(len, every.values())), list[Mutant]()
    for file, mutants in every.items():
        random.Random(f"{seed} {file}").shuffle(mutants)
        turns, seen = list[tuple[int, int]](), Counter[str]()
        for mutant in mutants:
            seen[mutant.operator] += 1
            turns.append((seen[mutant.operator], len(turns)))
        order = [mutants[index] for _, index in sorted(turns)]
        chosen += order[: max(1, round(count * len(mutants) / whole))]
    random.Random(seed).shuffle(chosen)
    return chosen


# Tests, run in a fork of this process, which has imported torch and DeepSpeed, on a copy of the checkout.


class Watch:
    """A pytest plugin: keeps the given order, notes what failed and seconds, and tells ``coverage`` which test runs."""

    def __init__(self, *, order: Sequence[str], coverage: Any) -> None:
        self._order, self._coverage = order, coverage
        self.notes: dict[str, Any] = {"failed": [], "skipped": [], "seconds": defaultdict(float)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        places = {name: place for place, name in enumerate(self._order)}
        items.sort(key=lambda item: places.get(item.nodeid, 0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self._coverage:
            self._coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.notes["seconds"][report.nodeid] += report.duration
        if report.outcome != "passed":
            self.notes[report.outcome].append(report.nodeid)


def _write_lines(folder: Path, coverage: Any) -> None:
    """Write lines by test and file; those of a forked rank belong to the test that started it."""
    coverage.stop()
    data, found = coverage.get_data(), defaultdict[str, dict[str, list[int]]](dict)
    rank = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    for path in data.measured_files():
        for line, tests in data.contexts_by_lineno(path).items():
            for test in tests:
                found[test or rank].setdefault(path.rpartition("/src/dsgpt/")[2], []).append(line)
    write_json_atomic(folder / f"lines-{os.getpid()}.json", found)


def be_pytest(
    words: Sequence[str], *, order: Sequence[str], repository: Path, copy: Path, folder: Path, traced: bool
) -> NoReturn:
    """Make this forked child a pytest of ``copy``, which holds nothing that was imported from ``repository``."""
    code = 1
    try:
        output = os.open(folder / "log.txt", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        own = str(repository / "tests")
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "dsgpt" or str(getattr(module, "__file__", "")).startswith(own):
                del sys.modules[name]
        sys.path[:0] = paths = [str(copy / "src"), str(copy / "tests")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.chdir(copy)
        coverage: Any = None
        if traced:
            files = [str(copy / "src/dsgpt" / file) for file in FILES]
            coverage = importlib.import_module("coverage").Coverage(data_file=None, config_file=False, include=files)
            coverage.start()
        if (copy / "tests/forked_ranks.py").exists():
            _serve_ranks(folder, coverage)
        watch = Watch(order=order, coverage=coverage)
        usual = [*PYTEST_WORDS, f"--basetemp={folder / 'tmp'}", "-c", "pyproject.toml", *words]
        code = int(importlib.import_module("pytest").main(usual, plugins=[watch]))
        if coverage:
            _write_lines(folder, coverage)
        write_json_atomic(folder / "report.json", watch.notes)
    except BaseException:  # noqa: BLE001 - as the interpreter reports it
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def _serve_ranks(folder: Path, coverage: Any) -> None:
    """Fork the server of ``tests/forked_ranks.py``, which need not import torch again."""
    ranks = importlib.import_module("forked_ranks")
    address, (reader, writer) = str(folder / "socket"), os.pipe()
    Path(address).unlink(missing_ok=True)
    if not os.fork():
        os.close(writer)
        os.dup2(reader, 0)
        os.environ.clear()  # also of variables of a launcher around this command
        os.environ.update(child_environment("cpu"))
        if coverage:
            end = os._exit

            def save_and_end(code: int) -> NoReturn:
                _write_lines(folder, coverage)
                end(code)

            os._exit = save_and_end  # type: ignore[assignment]  # of Never, mypy has two
        ranks.serve(address)
        os.kill(os.getpid(), 9)
    while not Path(address).exists():
        time.sleep(0.01)
    os.environ[ranks.ADDRESS] = address


# The suite.


def mutants_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.mutants`` makes it.
        source: the record's path, for the reader.
    """
    ones, reasons = record["mutants"], judgments()
    head = frame.filled("mutants", record, record_at=source, summary=bullets(summary_lines(record)))
    counted, tables = ["mutants", "caught", "of these by a limit of time", "equivalent", "other survivors"], []
    for key in ("operator", "file"):
        names = sorted({one[key] for one in ones})
        rows = [[name, *_counts([one for one in ones if one[key] == name], reasons)] for name in names]
        tables.append(frame.section(f"By {key}", [key, *counted], rows))
    rows = []
    for one in _survived(ones):
        line, change = f"{one['file']}:{one['line']}", f"`{one['name'].partition(': ')[2]}`"
        rows.append([line, change, reasons.get(one["name"], "**not judged**")])
    return frame.page_of(head, *tables, frame.section("Survivors", ["line", "change", "why no test fails"], rows))


def _survived(ones: Sequence[frame.Record]) -> list[frame.Record]:
    return [one for one in ones if one["outcome"] == "survived"]


def _counts(ones: Sequence[frame.Record], reasons: Mapping[str, str]) -> list[int]:
    """All, caught, of these by a limit of time, equivalent, other survivors."""
    survived = _survived(ones)
    same = sum(reasons.get(one["name"], "").startswith(REASONS[0]) for one in survived)
    late = sum(one["outcome"] == "timeout" for one in ones)
    return [len(ones), len(ones) - len(survived), late, same, len(survived) - same]


def judgments() -> dict[str, str]:
    """The reasons for survivors, by their names.

    Raises:
        UserError: one does not begin as it must.
    """
    reasons = read_object(JUDGED)
    for name, reason in reasons.items():
        if not str(reason).startswith(REASONS):
            raise UserError(f"{JUDGED}: {name}: a reason must begin with one of {', '.join(map(repr, REASONS))}")
    return reasons


def summary_lines(record: frame.Record) -> list[str]:
    """The figures of the page's summary, for a console."""
    if not record["mutants"]:
        return ["no mutant has been tried yet"]
    tried, caught, _, same, others = _counts(record["mutants"], judgments())
    return [
        f"{caught} of {tried - same} mutants that are not equivalent were caught: {caught / max(1, tried - same):.1%}.",
        f"{same} are equivalent, {others} others survived. {record['left']} of {record['sampled']} are not tried yet.",
    ]


@dataclass(frozen=True, kw_only=True)
class MutantOptions(frame.SuiteOptions):
    """The command line."""

    mutants: int = flag(POSITIVE, "N", "how many mutants (default: %(default)s)", default=MUTANTS)
    seed: int = flag(COUNT, "N", "seed that chooses them (default: %(default)s)", default=SEED)
    minutes: int = flag(POSITIVE, "N", default=40)
    """stop after these; the same command continues (default: %(default)s)"""
    only: tuple[str, ...] = frame.only_flag("FILE", "files, by the beginnings of their names")
    survivors: bool = switch(
        "try what survived without a reason again, with more tests, also long ones of all strategies"
    )
    tests: tuple[str, ...] = flag(
        str,
        "WORD",
        "with --survivors: only quick tests whose names contain one of these",
        default=(),
        nargs="+",
    )


class Mutants(frame.Suite[MutantOptions, frame.Record]):
    """Changes the code and runs its tests.

    mutants: change one place of the code that decides what a step computes or what a resume restores, in a copy of the
    checkout, and run the tests that execute its line; one must fail. Comparisons, arithmetic and constants change,
    statements and collectives are left out, arguments, ranks and groups are swapped. Which test executes which line is
    found out first, and kept beside the record. The tests need pip install -e '.[test]'. Exit code 0: what survived has
    a reason in src/dsgpt/benchmarks/mutants.json; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py mutants --minutes 30
      .venv/bin/python src/benchmark.py mutants --only data/order.py
      .venv/bin/python src/benchmark.py mutants --survivors --tests test_the_new_one
      .venv/bin/python src/benchmark.py mutants --table-from checkpoint/mutants/mutants.json
    """

    name, record_of, unit, failure_line = "mutants", "mutants", "mutant", "SURVIVED: {}"
    counted = "mutants"
    flags, page, summary = MutantOptions, staticmethod(mutants_page), staticmethod(summary_lines)

    def plan(self) -> int:
        if any(importlib.util.find_spec(name) is None for name in ("coverage", "pytest")):
            raise UserError("mutants need coverage and pytest: pip install -e '.[test]'")
        if self.options.tests and not self.options.survivors:
            raise UserError("--tests: what few tests were tried on would count as a survivor: give --survivors")
        self._until = time.monotonic() + 60 * self.options.minutes
        package = self.repository / "src/dsgpt"
        self._sources = {file: (package / file).read_bytes() for file in FILES}
        self._sums = {file: sha256_of(package / file) for file in FILES}
        self._chosen = sample(self._sources, count=self.options.mutants, seed=self.options.seed)
        earlier = self.earlier.get("mutants", ())
        same = [one for one in earlier if one["sha256"] == self._sums.get(one["file"])]
        self._earlier = self.kept(same, [mutant.name for mutant in self._chosen])
        again = {one["name"] for one in _survived([*self._earlier.values()])} - judgments().keys()
        files = frame.selected({file: file for file in FILES}, self.options.only)
        names = again if self.options.survivors else {mutant.name for mutant in self._chosen} - self._earlier.keys()
        self._todo = [mutant for mutant in self._chosen if mutant.file in files and mutant.name in names]
        return len(self._todo)

    def begin(self) -> None:
        self._copy, self._sound = self.folder / "copy", {one["by"] for one in self._earlier.values()}
        words = ["git", "clone", "--quiet", "--shared", str(self.repository), str(self._copy)]
        if subprocess.run(words, check=False).returncode:
            raise UserError(f"{self.repository} is no git repository: mutants need a checkout")
        for name in ("src", "tests"):  # what is not committed is tested, too
            unused = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(self.repository / name, self._copy / name, dirs_exist_ok=True, ignore=unused)
        self._written = 0
        with mock.patch.dict(os.environ, child_environment("cpu")):
            for module in WARM:
                importlib.import_module(module)
            for plugin in entry_points(group="pytest11"):
                plugin.load()
        self._map = [*self._traced()]

    def _traced(self) -> Iterator[tuple[str, float, dict[str, list[int]]]]:
        """Test, seconds and lines by file, of all ``TESTS`` that pass; what an earlier call found is read."""
        for test in TESTS:
            kept = self.options.output.parent / "lines" / f"{test.replace('/', '-')}.json"
            paths = [f"tests/{test}", *(f"src/dsgpt/{file}" for file in FILES)]
            made_of = {path: sha256_of(self._copy / path) for path in paths}
            with contextlib.suppress(JsonError):
                before = read_object(kept, max_bytes=frame.MAX_BYTES)
                if all(made_of[name] == before["made_of"].get(name) for name in before["used"]):
                    yield from ((name, one["seconds"], one["lines"]) for name, one in before["tests"].items())
                    continue
            if time.monotonic() > self._until:
                continue
            self.console.say(f"which lines does tests/{test} execute?")
            _, notes = self._pytest([f"tests/{test}"], limit=1200, traced=True)
            if not notes:
                raise UserError(f"tests/{test} did not end: {(self.folder / 'log.txt').read_text()[-2000:]}")
            lines = defaultdict[str, dict[str, set[int]]](dict)
            for file in self.folder.glob("lines-*.json"):
                for name, found in read_object(file, max_bytes=frame.MAX_BYTES).items():
                    for path, numbers in found.items():
                        lines[name].setdefault(path, set()).update(numbers)
                remove(file)
            tests = {}
            for name in sorted(notes["seconds"].keys() - {*notes["failed"], *notes["skipped"]}):
                own = {path: sorted(numbers) for path, numbers in lines[name].items()}
                tests[name] = {"seconds": notes["seconds"][name], "lines": own}
            used = {f"tests/{test}", *(f"src/dsgpt/{path}" for one in tests.values() for path in one["lines"])}
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(kept, {"made_of": made_of, "used": sorted(used), "tests": tests})
            yield from ((name, one["seconds"], one["lines"]) for name, one in tests.items())

    def results(self) -> Iterator[frame.Record]:
        for mutant in self._todo:
            mark = {"name": mutant.name, "sha256": self._sums[mutant.file]}
            yield self._try(mutant) | asdict(mutant) | mark

    def _try(self, mutant: Mutant) -> frame.Record:
        """Outcome, the test that failed, the number of tests, seconds."""
        began, (first, last) = time.monotonic(), mutant.lines
        every = sorted((seconds, name, lines.get(mutant.file, ())) for name, seconds, lines in self._map)
        near = [any(first <= line <= last for line in lines) for _, _, lines in every]
        seen, turns, tests, total = Counter[str](), list[tuple[bool, int, float, str]](), list[str](), 0.0
        for (seconds, name, lines), exact in zip(every, near, strict=True):
            asked = not self.options.tests or any(word in name for word in self.options.tests)
            if asked and (exact or (lines and (any(near) or not mutant.function))):
                seen[function := name.partition("[")[0]] += 1
                turns.append((not exact, seen[function], seconds, name))
        # Each function once, before any with other parameters. Lines that run at the import belong to one test of many.
        most, most_sec = MOST[self.options.survivors]
        for *_, seconds, name in sorted(turns)[:most]:
            if (total := total + seconds) > most_sec and tests:
                break
            tests.append(name)
        end = self._caught(mutant, tests, limit=START_SEC + 5 * total, late="timeout")
        if not end and self.options.survivors and not self.options.tests:
            word = ABOUT.get(Path(mutant.file).stem)
            slow = [*(f"tests/{test}" for test in SLOW_TESTS), "-m", "", *(["-k", word] if word else [])]
            end = self._caught(mutant, slow, limit=SLOW_SEC, late="")
        end = end or {"outcome": "survived", "by": ""}
        return end | {"tests": len(tests), "seconds": round(time.monotonic() - began, 1)}

    def _caught(self, mutant: Mutant, tests: Sequence[str], *, limit: float, late: str) -> frame.Record:
        """Outcome and the test that failed, of which none fails without the mutant; empty if it survives.

        Args:
            mutant: in the copy while tests run.
            tests: words of pytest's command line; none if it is empty.
            limit: seconds.
            late: the outcome if the limit ends them; empty if that says nothing.
        """
        path, source, words = self._copy / "src/dsgpt" / mutant.file, self._sources[mutant.file], [*tests]
        for _ in range(CONTROLS if words else 0):
            try:
                self._write(path, mutant.of(source))
                code, notes = self._pytest([*words, "-x"], limit=limit, order=words)
            finally:
                self._write(path, source)
            if code in (0, 5) or (code is None and not late):
                break  # none failed, or none is left
            by = notes["failed"][0] if notes.get("failed") else ""
            # What must pass without the mutant, behind the same tests; a file that cannot be imported, be collected.
            before = words[: words.index(by)] if by in words else []
            control = [*before, by] if by else [*words, "--collect-only"] if code in (2, 3, 4) else words
            if (by and by in self._sound) or self._pytest(control, limit=limit, order=control)[0] == 0:
                self._sound.add(by)
                return {"outcome": late if code is None else "caught", "by": by}
            words.extend(["--deselect", by] if by else [])  # it fails without the mutant, too
            limit *= 2  # the machine may be slow
        return {}

    def _write(self, path: Path, source: bytes) -> None:
        """Write a file of the copy, at a time of its own: Python keeps compiled files by seconds and size."""
        path.write_bytes(source)
        self._written += 1
        os.utime(path, (self._written, self._written))

    def _pytest(
        self, words: Sequence[str], *, limit: float, order: Sequence[str] = (), traced: bool = False
    ) -> tuple[int | None, dict[str, Any]]:
        """The exit code of a pytest in a fork, and what ``Watch`` noted.

        None if it and its processes have used ``limit`` seconds of the processor, whatever others use, or are stuck.
        """
        report, this = self.folder / "report.json", psutil.Process()
        begun = {one.pid for one in this.children(recursive=True)}
        remove(report)
        shutil.rmtree(self.folder / "tmp", ignore_errors=True)
        adopt = ctypes.CDLL(None).prctl
        adopt(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a test leaves behind becomes a child of this process
        sys.stdout.flush()

        def started() -> list[psutil.Process]:
            return [one for one in this.children(recursive=True) if one.pid not in begun]

        child = os.fork()
        if not child:
            paths = {"repository": self.repository, "copy": self._copy, "folder": self.folder}
            be_pytest(words, order=order, traced=traced, **paths)
        code, look, end = None, time.monotonic() + LOOK_SEC, time.monotonic() + WAIT * limit
        try:
            while code is None and time.monotonic() < end:
                time.sleep(0.05)
                done, status = os.waitpid(child, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
                if time.monotonic() > look and code is None:
                    look += LOOK_SEC
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if sum(sum(one.cpu_times()[:4]) for one in started()) > limit:
                            break
        finally:
            left = started()
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(left, timeout=LOOK_SEC)
            adopt(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        with contextlib.suppress(JsonError):
            return code, read_object(report, max_bytes=frame.MAX_BYTES)
        return code, {}

    def line(self, result: frame.Record, *, count: str, left: str) -> str:
        by = f" by {result['by']}" if result["by"] else ""
        return f"{count} {result['name']}: {result['outcome']}{by} ({result['seconds']:.0f} s{left})"

    def record(self, results: Sequence[frame.Record]) -> frame.Record:
        tried = self._earlier | {one["name"]: one for one in results}
        ones = [tried[mutant.name] for mutant in self._chosen if mutant.name in tried]
        facts = {"seed": self.options.seed, "sampled": len(self._chosen), "left": len(self._chosen) - len(ones)}
        return facts | {"files": FILES, "tests": [*TESTS, *SLOW_TESTS], "mutants": ones}

    def failures(self, record: frame.Record) -> list[str]:
        reasons = judgments()
        survived = [one["name"] for one in record["mutants"] if one["outcome"] == "survived"]
        return [name for name in survived if name not in reasons]


PR_SET_CHILD_SUBREAPER = 36
"""Of ``prctl(2)``."""
