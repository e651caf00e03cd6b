"""Measure what strategies do: ``parity`` shows that all train the same model, ``resume`` that each goes on from any,
``faults`` that no fault costs more than the steps since the last checkpoint; ``saving`` measures how long training
waits for checkpoints.

Every measurement is a command of its own with its own flags; all of them leave a JSON record and a page made of it.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from dsgpt.benchmarks.faults import command as faults
from dsgpt.benchmarks.faults.plan import KILLS
from dsgpt.benchmarks.faults.plan import SEED as FAULT_SEED
from dsgpt.benchmarks.parity import command as parity
from dsgpt.benchmarks.parity.matrix import STRATEGIES
from dsgpt.benchmarks.resume import command as any_to_any
from dsgpt.benchmarks.resume.matrix import PAIRS, SEED
from dsgpt.benchmarks.saving import command as saving
from dsgpt.common.command_line import Parser, Reader, read_words
from dsgpt.common.errors import EXIT_DONE
from dsgpt.common.script import run_script

REPOSITORY = Path(__file__).resolve().parent.parent
DESCRIPTIONS = {
    "parity": """\
parity: train the same small model under every strategy, at 1, 2, 4 and 8 ranks, with and without accumulation, with
AdamW and SGD, in fp32 and bf16, and compare every step with plain PyTorch; then plant known bugs and show that each one
is caught. Exit code 0: all are equal and all bugs were caught; 1: not so.""",
    "resume": """\
resume: let every strategy take up one and the same checkpoint and write it again, which must give the same bytes; and
let pairs of strategies share a run, where one trains 10 steps and saves and the other resumes for 10 more, which must
give the losses of a run that nobody disturbed. Exit code 0: they do; 1: not so.""",
    "faults": """\
faults: kill ranks, launchers and whole runs at seeded instants, send signals, damage checkpoints, fill the disk; then
resume every run, which must end with the losses of a run that nobody disturbed, to the last bit. Exit code 0: they all
do; 1: not so.""",
    "saving": """\
saving: train the model `tiny` with --save_mode sync and async in turn, and compare how long training waits for each
checkpoint. Exit code 0: async waits at most a fifth of the time; 1: longer.""",
}
EXAMPLES = {
    "parity": f"""\
examples:
  python src/benchmark.py parity
  python src/benchmark.py parity --core
  python src/benchmark.py parity --only zero1 zero3 --ranks 2
  python src/benchmark.py parity --table-from checkpoint/parity/parity.json

strategies: {", ".join(STRATEGIES)}""",
    "resume": """\
examples:
  python src/benchmark.py resume
  python src/benchmark.py resume --pairs 100 --seed 1
  python src/benchmark.py resume --table-from checkpoint/resume/resume.json""",
    "faults": """\
examples:
  python src/benchmark.py faults
  python src/benchmark.py faults --kills 200 --seed 1
  python src/benchmark.py faults --table-from checkpoint/faults/faults.json""",
    "saving": """\
examples:
  python src/benchmark.py saving
  python src/benchmark.py saving --rounds 10""",
}


def main() -> int:
    """Read the flags and run; the exit code comes back."""
    words = sys.argv[1:]
    what = words[0] if words and words[0] in COMMANDS else ""
    reader = Reader()
    flags = read_words(_parser(what, reader), reader, words, elsewhere={})
    reader.problems.raise_if_any()
    return COMMANDS[what](flags)


def _parser(what: str, reader: Reader) -> Parser:
    """For one measurement; for none of them where the first word names none."""
    parser = Parser(
        description=DESCRIPTIONS[what] if what else "\n\n".join(DESCRIPTIONS.values()),
        epilog=EXAMPLES[what] if what else "flags: python src/benchmark.py parity --help, and so on",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=tuple(COMMANDS), help="what to measure")
    if what == "parity":
        _add_parity_flags(parser, reader)
    elif what == "resume":
        _add_resume_flags(parser, reader)
    elif what == "faults":
        _add_fault_flags(parser, reader)
    elif what == "saving":
        _add_saving_flags(parser, reader)
    return parser


def _add_parity_flags(parser: Parser, reader: Reader) -> None:
    parser.add_argument(
        "--ranks",
        type=reader.whole("--ranks", low=1),
        nargs="+",
        metavar="N",
        help="only these numbers of processes (default: 1, 2, 4 and 8)",
    )
    parser.add_argument("--only", nargs="+", metavar="STRATEGY", help="only these strategies (default: all)")
    parser.add_argument(
        "--core", action="store_true", help="only what `make test` runs: each strategy in a few trainings"
    )
    _add_device_flag(parser, reader, "cpu, where every machine can run everything, or cuda with a GPU for each rank")
    _add_output_flags(parser, "parity")


def _add_resume_flags(parser: Parser, reader: Reader) -> None:
    parser.add_argument(
        "--pairs",
        type=reader.whole("--pairs", low=0),
        default=PAIRS,
        metavar="N",
        help=f"how many pairs of strategies (default: {PAIRS})",
    )
    parser.add_argument(
        "--seed",
        type=reader.whole("--seed", low=0),
        default=SEED,
        metavar="N",
        help=f"that the pairs are drawn with (default: {SEED}, as in docs/resume.md)",
    )
    parser.add_argument("--core", action="store_true", help="only what `make test` runs")
    _add_output_flags(parser, "resume")


def _add_fault_flags(parser: Parser, reader: Reader) -> None:
    parser.add_argument(
        "--kills",
        type=reader.whole("--kills", low=0),
        default=KILLS,
        metavar="N",
        help=f"how many kills (default: {KILLS})",
    )
    parser.add_argument(
        "--seed",
        type=reader.whole("--seed", low=0),
        default=FAULT_SEED,
        metavar="N",
        help=f"that victims and instants are drawn with (default: {FAULT_SEED}, as in docs/faults.md)",
    )
    parser.add_argument("--core", action="store_true", help="only what `make test` runs")
    _add_output_flags(parser, "faults")


def _add_saving_flags(parser: Parser, reader: Reader) -> None:
    parser.add_argument(
        "--rounds",
        type=reader.whole("--rounds", low=1),
        default=5,
        metavar="N",
        help="runs of each save mode (default: 5)",
    )
    _add_device_flag(parser, reader, "cpu or cuda")
    _add_output_flags(parser, "saving")


def _add_device_flag(parser: Parser, reader: Reader, text: str) -> None:
    parser.add_argument(
        "--device",
        type=reader.choice("--device", ("cpu", "cuda"), "cpu"),
        default="cpu",
        metavar="KIND",
        help=f"{text} (default: cpu)",
    )


def _add_output_flags(parser: Parser, what: str) -> None:
    record = Path("checkpoint") / what / f"{what}.json"
    parser.add_argument(
        "--output",
        type=Path,
        default=record,
        metavar="RECORD",
        help=f"the record to write (default: {record.as_posix()})",
    )
    parser.add_argument("--page", type=Path, metavar="MD", help="the page to write (default: beside the record)")
    parser.add_argument(
        "--table-from", type=Path, metavar="RECORD", help="run nothing; make the page from a record of before"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave recipes, logs and measurements of every training there"
    )


def _page(flags: argparse.Namespace) -> Path:
    return flags.page or (flags.table_from or flags.output).with_suffix(".md")


def _parity(flags: argparse.Namespace) -> int:
    if flags.table_from:
        return _only_page(parity.make_page, flags)
    options = parity.ParityOptions(
        ranks=flags.ranks or (),
        only=flags.only or (),
        core=flags.core,
        output=flags.output,
        page=_page(flags),
        keep=flags.keep,
        device=flags.device,
    )
    return parity.run_parity(options, repository=REPOSITORY)


def _resume(flags: argparse.Namespace) -> int:
    if flags.table_from:
        return _only_page(any_to_any.make_page, flags)
    options = any_to_any.ResumeOptions(
        pairs=flags.pairs,
        seed=flags.seed,
        core=flags.core,
        output=flags.output,
        page=_page(flags),
        keep=flags.keep,
    )
    return any_to_any.run_resume(options, repository=REPOSITORY)


def _faults(flags: argparse.Namespace) -> int:
    if flags.table_from:
        return _only_page(faults.make_page, flags)
    options = faults.FaultOptions(
        kills=flags.kills,
        seed=flags.seed,
        core=flags.core,
        output=flags.output,
        page=_page(flags),
        keep=flags.keep,
    )
    return faults.run_faults(options, repository=REPOSITORY)


def _saving(flags: argparse.Namespace) -> int:
    if flags.table_from:
        return _only_page(saving.make_page, flags)
    options = saving.SavingOptions(
        rounds=flags.rounds, device=flags.device, output=flags.output, page=_page(flags), keep=flags.keep
    )
    return saving.run_saving(options, repository=REPOSITORY)


def _only_page(make_page: Callable[[Path, Path], None], flags: argparse.Namespace) -> int:
    page = _page(flags)
    make_page(flags.table_from, page)
    print(page)
    return EXIT_DONE


COMMANDS = {"parity": _parity, "resume": _resume, "faults": _faults, "saving": _saving}


if __name__ == "__main__":
    run_script(main)
