"""From the words of a command line to ``Options``. Every mistake is collected, none stops the reading of the rest."""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import fields

from dsgpt.cli_flags import build_parser
from dsgpt.cli_reader import Reader
from dsgpt.options import Options
from dsgpt.problems import Problems, did_you_mean

_RECIPE = "it is the recipe's, {} in the JSON of --deepspeed_config"
_ELSEWHERE = {
    "--lr": _RECIPE.format("optimizer.params.lr"),
    "--learning_rate": _RECIPE.format("optimizer.params.lr"),
    "--weight_decay": _RECIPE.format("optimizer.params.weight_decay"),
    "--warmup_steps": _RECIPE.format("scheduler.params.warmup_num_steps"),
    "--batch_size": "give --global_batch_size (over all ranks) or --micro_batch_size_per_gpu",
    "--block_size": "give --seq_length",
}
"""Flags that other trainers have, and where to say it here."""


def parse_arguments(arguments: Sequence[str]) -> tuple[Options, Problems]:
    """Read a command line; the mistakes found come back beside the options.

    Raises:
        UserError: argparse cannot read the line at all, for example a value for a flag that takes none.
    """
    reader = Reader()
    parser = build_parser(reader)
    namespace, unknown = parser.parse_known_args(_with_values(arguments, parser, reader))
    known = [flag for action in parser._actions for flag in action.option_strings]
    previous_unknown = False
    for word in unknown:
        name = word.split("=")[0]
        if word.startswith("--"):
            hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, known)
            reader.problems.add(f"{name} is no known flag{hint}")
        elif not previous_unknown:
            reader.problems.add(f"{word!r} belongs to no flag")
        previous_unknown = word.startswith("--")
    names = {field.name for field in fields(Options)}
    given = {name: value for name, value in vars(namespace).items() if name in names and value is not None}
    return Options(**given), reader.problems


def _with_values(arguments: Sequence[str], parser: argparse.ArgumentParser, reader: Reader) -> list[str]:
    """``arguments`` less the flags whose value is missing, which are noted: argparse would stop at the first."""
    takers = {flag for action in parser._actions if action.nargs is None for flag in action.option_strings}
    kept = []
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        if word in takers and following.startswith("--"):
            reader.problems.add(f"{word} needs a value")
        else:
            kept.append(word)
    return kept
