"""From the words of a command line to ``Options``. Every mistake is collected, none stops the reading of the rest."""

from collections.abc import Sequence
from dataclasses import fields

from dsgpt.common.command_line import Reader, read_words
from dsgpt.common.problems import Problems
from dsgpt.config.flags import build_parser
from dsgpt.config.options import Options

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
    namespace = read_words(parser, reader, arguments, elsewhere=_ELSEWHERE)
    names = {field.name for field in fields(Options)}
    given = {name: value for name, value in vars(namespace).items() if name in names and value is not None}
    return Options(**given), reader.problems
