"""``benchmark.py museum``: silent bugs that real trainers shipped, planted in this one, and what notices them.

An ``Exhibit`` is a bug that a public thread describes, reduced to its mechanism. It is planted in the code that trains
here, or in the installed library. Then a check runs that every user can run: a training of the parity suite or a resume
of the resume suite. The same check runs without the bug, and must pass.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import math
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from dsgpt.benchmarks import frame
from dsgpt.benchmarks.cells import Cell, CellEnd, CellRunner
from dsgpt.benchmarks.launch import Assignment
from dsgpt.benchmarks.parity import Parity, ParityOptions
from dsgpt.benchmarks.resume import BOUND, Pair, Resume, ResumeOptions, Subject
from dsgpt.common.command_line import NUMBER, flag
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.config.recipe import merged

# What an exhibit is, and how a bug is planted.

Plant = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a bug is planted in this process."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a check noticed."""

    check: str
    """The check, and where it noticed it: ``parity: gradient norm``."""
    measured: float | None = None
    """How far off; None if two values must be equal, and are not."""
    bound: float | None = None
    step: int | None = None
    """The optimizer step after which it is noticed; None if that is before the first."""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A bug of a real system."""

    thread: str
    """Below github.com: ``deepspeedai/DeepSpeed/pull/8154``. ``name`` is made of it."""
    year: int
    effect: str
    """What it did to users."""
    mechanism: str
    """In one line, as it is planted here."""
    reduced: str = ""
    """How the planted bug differs from that of the thread; empty if it is the same."""
    plant: Plant = contextlib.nullcontext
    where: Cell | Pair | None = None
    """The training in which it is planted, or the resume, in whose second run it is; None if it is not shown."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Changes of the recipe, without which the bug does nothing; the training without the bug has them too."""
    ends: str = ""
    """A part of the message with which the run must end; empty if the check compares what it computed."""
    absent: str = ""
    """Why it cannot be shown here; empty if it is shown."""

    @property
    def name(self) -> str:
        """``deepspeed-8154``."""
        _, repository, *_, number = self.thread.split("/")
        return f"{repository.lower()}-{number}"


EXHIBITS: dict[str, Exhibit] = {}
"""By name, in the order of the page; ``load`` fills it."""
FAMILIES = ("deepspeed", "others")
"""The modules ``museum_NAME``, each of which adds its exhibits when it is imported."""


def exhibit(
    thread: str, year: int, where: Cell | Pair | None = None, **more: Any
) -> Callable[[Callable[[], Plant]], None]:
    """A decorator that adds what the function plants in ``where`` to ``EXHIBITS``.

    The paragraphs of its docstring are ``effect``, ``mechanism`` and, if there is a third, ``reduced``.
    """

    def add(made: Callable[[], Plant]) -> None:
        effect, mechanism, *reduced = (" ".join(part.split()) for part in (inspect.getdoc(made) or "").split("\n\n"))
        texts = {"effect": effect, "mechanism": mechanism, "reduced": " ".join(reduced)} | more
        one = Exhibit(thread=thread, year=year, where=where, plant=made(), **texts)
        EXHIBITS[one.name] = one

    return add


def load() -> None:
    """Fill ``EXHIBITS``."""
    for name in FAMILIES:
        importlib.import_module(f"dsgpt.benchmarks.museum_{name}")


def replaced(owner: str, attribute: str, function: Callable[..., Any]) -> Plant:
    """Plants ``function`` in the place of ``owner.attribute``.

    Args:
        owner: ``module:Class``, or a module.
        attribute: its name.
        function: gets the original first, then the original's arguments.
    """

    def plant() -> AbstractContextManager[Any]:
        holder = pkgutil.resolve_name(owner)
        original = getattr(holder, attribute)
        wrapper = functools.wraps(original)(lambda *given, **named: function(original, *given, **named))
        return mock.patch.object(holder, attribute, wrapper)

    return plant


def built(owner: str, change: Callable[[Any], object]) -> Plant:
    """Plants ``change``, which gets each object of ``owner`` (``module:Class``) when it is made."""

    def build(original: Callable[..., None], self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        change(self)

    return replaced(owner, "__init__", build)


def edited(owner: str, attribute: str, fixed: str, broken: str) -> Plant:
    """Plants the text ``broken`` in the place of ``fixed``, which the source of ``owner.attribute`` has once.

    So the line of a library that a fix replaced comes back.

    Args:
        owner: ``module:Class``, or a module.
        attribute: name of a function, as its source has it.
        fixed: a part of its source.
        broken: what stands there instead.

    Raises:
        LookupError: when it is planted, if the source does not have ``fixed`` once.
    """

    def plant() -> AbstractContextManager[Any]:
        holder = pkgutil.resolve_name(owner)
        named = holder if inspect.isclass(holder) else getattr(holder, attribute)
        home = sys.modules[named.__module__]
        source = _source_of(holder if named is holder else home, attribute)
        if source.count(fixed) != 1:
            raise LookupError(f"{owner}.{attribute}: has {source.count(fixed)} times {fixed!r}, not once")
        kind = holder.__name__.lstrip("_") if named is holder else "Holder"  # of which private names are made
        private = f"_{kind}{attribute}" if attribute.startswith("__") and named is holder else attribute
        text = f"class {kind}:\n{textwrap.indent(source.replace(fixed, broken), '    ')}"
        made: dict[str, Any] = {}
        exec(compile(text, str(home.__file__), "exec"), vars(home), made)
        return mock.patch.object(holder, private, vars(made[kind])[private])

    return plant


def _source_of(holder: Any, function: str) -> str:
    """The source of a function of a class or module, with its decorators; empty if there is none.

    ``inspect.getsource`` gives that of a decorator's function instead.
    """
    source = textwrap.dedent(inspect.getsource(holder))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return textwrap.dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno]))
    return ""


# Launches exhibits: trainings of the parity suite and resumes of the resume suite, with the bug and without it.

WITHOUT = "without "
"""Before the name of an exhibit: the same training without the bug."""
STEPS = 6
"""Optimizer steps of a training, of which the third is the first with a learning rate above 0."""


def planted(flags: list[str], folder: Path, *, exhibit: str, call: str, given: dict[str, Any]) -> None:
    """One rank: call ``module:function`` with the bug of ``exhibit`` planted."""
    load()
    with EXHIBITS[exhibit].plant():
        pkgutil.resolve_name(call)(flags, folder, **given)


class Runner(CellRunner):
    """Plants the exhibit that the ``bug`` of a cell names."""

    def assignment(self, cell: Cell, **named: Any) -> Assignment:
        made, name = super().assignment(cell, **named), exhibit_of(cell)
        if not name:
            return made
        if changes := EXHIBITS[name].changes:
            recipe = Path(made.folder) / "recipe.json"
            write_json_atomic(recipe, merged(read_object(recipe), changes))
        given = made.arguments | {key: "" for key in ("bug",) if key in made.arguments}  # none of the suite's own
        if cell.bug.startswith(WITHOUT):
            return replace(made, arguments=given)
        return replace(made, call=f"{__name__}:planted", arguments={"exhibit": name, "call": made.call, "given": given})


def exhibit_of(cell: Cell) -> str:
    """The name of the exhibit that a cell is trained with, or for; empty if there is none."""
    name = cell.bug.removeprefix(WITHOUT)
    return name if name in EXHIBITS else ""


class Trainings(Parity):
    """The parity suite, with exhibits in some of its cells; each result has its cell under ``subject``."""

    def __init__(self, cells: Iterable[Cell], folder: Path, repository: Path) -> None:
        super().__init__(ParityOptions(output=folder, steps=STEPS), repository)
        self.folder, self._cells = folder, list(cells)
        self.begin()
        self._runner = Runner(folder, repository=repository, device="cpu", steps=STEPS)

    def _judge(self, cell: Cell, end: CellEnd) -> frame.Record:
        judged = super()._judge(replace(cell, bug="") if exhibit_of(cell) else cell, end)
        return judged | {"bug": cell.bug, "subject": cell}


class Resumes(Resume):
    """The resume suite on pairs with exhibits; each result has its pair under ``subject``."""

    def __init__(self, pairs: Iterable[Pair], folder: Path, repository: Path) -> None:
        super().__init__(ResumeOptions(output=folder), repository)
        self.folder, self._pairs, self._cells = folder, list(pairs), []
        self.begin()
        self._runner = Runner(folder, repository=repository, device="cpu", steps=self.steps)

    def _judge(self, subject: Subject, end: CellEnd) -> frame.Record:
        return super()._judge(subject, end) | {"subject": subject}


def marked(exhibit: Exhibit, mark: str) -> Any:
    """The exhibit's cell or pair, whose ``bug`` is ``mark``."""
    if isinstance(exhibit.where, Pair):
        return replace(exhibit.where, target=replace(exhibit.where.target, bug=mark))
    return replace(exhibit.where, bug=mark) if exhibit.where else None


_AFTER = {"first gradient": 1, "first update": 3}
"""Steps after which facts of the parity suite that name no step are known; all others at the end."""


def seen_in(result: frame.Record) -> list[Seen]:
    """What a failed training, or resume, showed: first what shows first, then what is furthest out of bounds."""
    if "target" in result:
        off = {fact: result["measured"].get(fact) for fact in ("loss", "validation loss")}
        seen = [
            Seen(check=f"resume: {fact}", measured=by, bound=BOUND) for fact, by in off.items() if by and by > BOUND
        ]
        return seen or [Seen(check=f"resume: {result['message']}")]
    seen = []
    for failure in result["failures"]:
        named = re.search(r"step (\d+)", str(failure["where"]))
        step = int(named.group(1)) if named else _AFTER.get(failure["fact"], STEPS)
        off, bound = failure.get("difference"), failure.get("bound")
        seen.append(Seen(check=f"parity: {failure['fact']}", measured=off, bound=bound, step=step))
    return sorted(seen, key=lambda one: (one.step, one.bound is None, -(one.measured or 0) / (one.bound or 1)))


# The page.

STATUS_WORDS = {
    "caught": "yes", "missed": "**NOT NOTICED**", "not clean": "**fails without the bug**", "error": "**ERROR**",
    "absent": "not shown",
}  # fmt: skip


def museum_page(record: frame.Record, *, source: str) -> str:
    """The page.

    Args:
        record: as ``dsgpt.benchmarks.museum`` makes it.
        source: the record's path, for the reader.
    """
    exhibits = [one for one in record["exhibits"] if one["status"] != "absent"]
    caught = sum(one["status"] == "caught" for one in exhibits)
    head = frame.filled("museum", record, record_at=source, caught=caught, shown=len(exhibits))
    header = ["bug", "what it did to users", "mechanism", "check that notices it, and by what margin", "after steps"]
    rows = [
        [_link(one), one["effect"], _mechanism(one), _margin(one), "" if one["step"] is None else one["step"]]
        for one in exhibits
    ]
    absent = [f"{_link(one)}: {one['effect']} {one['message']}" for one in record["exhibits"] if one not in exhibits]
    troubles = frame.troubles([one for one in exhibits if one["status"] != "caught"], STATUS_WORDS)
    return frame.page_of(head, frame.section("Exhibits", header, rows), frame.listed("Not shown", absent), troubles)


def _link(one: frame.Record) -> str:
    _, repository, *_, number = one["thread"].split("/")
    return f"[{repository} {number[:7]}](https://github.com/{one['thread']}), {one['year']}"


def _mechanism(one: frame.Record) -> str:
    text = f"{one['mechanism']} Planted in {one['where']}." if one["where"] else one["mechanism"]
    return f"{text} *Reduced: {one['reduced']}*" if one["reduced"] else text


def _margin(one: frame.Record) -> str:
    if one["status"] != "caught":
        return STATUS_WORDS[one["status"]]
    if one["bound"] is None:
        return str(one["check"])
    if one["measured"] in {None, math.inf}:  # a record has None
        return f"{one['check']} is not finite"
    return f"{one['check']} off by {one['measured']:.1e}, {one['measured'] / one['bound']:,.3g} times the bound"


def summary_lines(record: frame.Record) -> list[str]:
    """How many were noticed, for a console."""
    counts = {word: sum(one["status"] == word for one in record["exhibits"]) for word in STATUS_WORDS}
    return [", ".join(f"{count} {word}" for word, count in counts.items() if count)]


# The suite.


@dataclass(frozen=True, kw_only=True)
class MuseumOptions(frame.SuiteOptions):
    """The command line."""

    only: tuple[str, ...] = frame.only_flag("NAME", "exhibits, again if the record has them")
    minutes: float = flag(NUMBER, "MIN", "begin no exhibit after this time (default: %(default)g)", default=40.0)


class Museum(frame.Suite[MuseumOptions, frame.Record]):
    """Plants bugs that real trainers shipped.

    museum: plant silent bugs that DeepSpeed, Megatron-LM, PyTorch and others shipped, one at a time, and run the check
    that must notice each: parity, resume, or another that users run. It must pass without the bug. A repeated command
    with the same --output continues. Exit code 0: all are noticed; 1: otherwise.

    Examples:
      .venv/bin/python src/benchmark.py museum
      .venv/bin/python src/benchmark.py museum --only deepspeed-8154 deepspeed-7985
      .venv/bin/python src/benchmark.py museum --table-from checkpoint/museum/museum.json
    """

    name, record_of, schema_version, unit = "museum", "the museum", "1.0", "exhibit"
    counted = "exhibits"
    failure_line = "not as it should be: {}"
    flags, page, summary = MuseumOptions, staticmethod(museum_page), staticmethod(summary_lines)

    def plan(self) -> int:
        load()
        only, earlier = self.options.only, self.earlier.get("exhibits", ())
        done = {one["name"] for one in earlier if one["status"] == "caught" and not only}
        self._todo = [one for name, one in frame.selected(EXHIBITS, only).items() if name not in done]
        names = {one.name for one in self._todo}
        self._earlier = {one["name"]: one for one in earlier if one["name"] not in names}
        return len(self._todo)

    def begin(self) -> None:
        self.console.say(f"{len(self._todo)} exhibits; {len(self._earlier)} are in {self.options.output} already")

    def results(self) -> Iterator[frame.Record]:
        yield from (_result(one, "absent", message=one.absent) for one in self._todo if one.absent)
        for kind, suite in ((Cell, Trainings), (Pair, Resumes)):
            waiting = [one for one in self._todo if isinstance(one.where, kind)]
            if not waiting:
                continue
            clean = {one.name: marked(one, f"{WITHOUT}{one.name}" if one.changes else "") for one in waiting}
            subjects = [*dict.fromkeys(clean.values()), *(marked(one, one.name) for one in waiting)]
            folder, ended = self.folder / kind.__name__.lower(), dict[Any, frame.Record]()
            folder.mkdir()
            for result in suite(subjects, folder, self.repository).results():
                ended[result["subject"]] = result
                for exhibit in list(waiting):
                    without, broken = ended.get(clean[exhibit.name]), ended.get(marked(exhibit, exhibit.name))
                    if without and broken:
                        waiting.remove(exhibit)
                        yield compared(exhibit, without, broken)

    def line(self, result: frame.Record, *, count: str, left: str) -> str:
        words = _margin(result) if result["status"] == "caught" else result["status"].upper()
        because = f": {result['message'].splitlines()[0]}" if result["message"] else ""
        return f"{count} {result['name']}: {words} ({result['seconds']:.1f} s{left}){because}"

    def record(self, results: Sequence[frame.Record]) -> frame.Record:
        every = self._earlier | {one["name"]: one for one in results}
        return {
            "work": {"steps": STEPS} | frame.work_facts("cpu"),
            "exhibits": [every[name] for name in EXHIBITS if name in every],
        }

    def failures(self, record: frame.Record) -> list[str]:
        return [one["name"] for one in record["exhibits"] if one["status"] not in {"caught", "absent"}]


def compared(exhibit: Exhibit, without: frame.Record, broken: frame.Record) -> frame.Record:
    """The result of an exhibit, by those of its training, or resume, without the bug and with it."""
    status, message, seen = "missed", broken["message"] or "", None
    if without["status"] != "passed":
        status = "not clean"
        message = f"without the bug: {without['status']}: {without['message'] or seen_in(without)[0].check}"
    elif broken["status"] == "failed":
        status, message, seen = "caught", "", seen_in(broken)[0]
    elif broken["status"] in {"error", "refused"}:
        status = "error"
        if exhibit.ends and exhibit.ends in message:
            status, message, seen = "caught", "", Seen(check=f"the run ends: {exhibit.ends}")
    return _result(exhibit, status, seen=seen, message=message, seconds=broken["seconds"])


def _result(
    exhibit: Exhibit, status: str, *, seen: Seen | None = None, message: str = "", seconds: float = 0.0
) -> frame.Record:
    """An exhibit with how it ended, as the record has it."""
    keys = ("name", "thread", "year", "effect", "mechanism", "reduced")
    where = exhibit.where.name if exhibit.where else ""
    facts = {key: getattr(exhibit, key) for key in keys} | {"where": where, "status": status}
    return facts | asdict(seen or Seen(check="")) | {"seconds": round(seconds, 2), "message": message}
