"""``dsgpt COMMAND``, or ``python -m dsgpt COMMAND``: one name for every script.

A command runs the script that a checkout has for it, with the same flags; an installed package brings the scripts along
(``setup.py``). Under a launcher: ``deepspeed --module dsgpt train ...`` or ``torchrun -m dsgpt train ...``.
"""

import importlib.metadata
import inspect
import os
import runpy
import sys
import textwrap
from collections.abc import Sequence

from dsgpt.common.command_line import COMPLETING, Parser, run_script
from dsgpt.common.errors import UserError, did_you_mean
from dsgpt.common.text import REPOSITORY

COMMANDS = {
    "demo": ("src/demo.py", "prepare text, train the same model in two ways, compare them, write text"),
    "data prepare": ("data_prep/preprocess.py", "turn text into token files"),
    "data small": ("data_prep/preprocess_small.py", "turn the first documents of a text into small token files"),
    "data merge": ("data_prep/merge.py", "join the parts that `prepare --shard` made"),
    "data download": ("data_prep/download_data.py", "fetch a text set"),
    "data verify": ("data_prep/verify.py", "read token files, and compare them with what is noted beside them"),
    "data convert": ("data_prep/exchange.py", "token files of nanoGPT, llm.c and Megatron-LM, to and from ours"),
    "data where": ("data_prep/where.py", "the documents behind a token, behind a step of a run, behind its spikes"),
    "train": ("src/gpt2.py", "train a model, or resume a training"),
    "doctor": ("src/doctor.py", "whether this machine, or a cluster, is fit for a training"),
    "plan": ("src/plan.py", "memory, time and money of a training before it runs; the best setup"),
    "bench": ("src/benchmark.py", "proofs and measurements, such as: parity, resume, speed, run, compare"),
    "records": ("src/benchmark.py records", "remake the committed records of a checkout"),
    "charts": ("charts/generate_charts.py", "compare runs: tables and pictures"),
    "dashboard": ("charts/dashboard.py", "see runs, plan, and try models, in a browser"),
    "generate": ("src/generate.py", "continue text"),
    "evaluate": ("src/evaluate.py", "perplexity, and tasks of lm-evaluation-harness"),
    "serve": ("src/serve.py", "answer OpenAI's requests for completions"),
    "export": ("src/convert.py", "write weights for other programs"),
}
"""Command -> the script or module that it runs, perhaps with a first word, and what it does."""


def main() -> None:
    """Run the command that the first words name; the others are its flags.

    Its help::

        usage: dsgpt COMMAND [FLAGS]

        Train GPT-2-class models from scratch with DeepSpeed, and compare parallel strategies on equal work.

        {commands}

        flags: dsgpt train --help, and so on; dsgpt --version
        examples:
          dsgpt demo --steps 100
          dsgpt plan --recommend --model_size small --gpu a100-80gb --gpus 4 --tokens 10B
          deepspeed --num_gpus 4 --module dsgpt train --run_type optimized ...
        completion of flags in bash: pip install argcomplete; eval "$(register-python-argcomplete dsgpt)"
    """
    if COMPLETING in os.environ:
        _complete()
        return
    ranks = [word for word in sys.argv[1:2] if word.startswith("--local_rank=")]  # DeepSpeed's launcher puts it first
    words = sys.argv[1 + len(ranks) :] + ranks
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        lines = (f"  {command:{width}}  {text}" for command, (_, text) in COMMANDS.items())
        print(textwrap.dedent((inspect.getdoc(main) or "").partition("::\n\n")[2]).format(commands="\n".join(lines)))
        return
    if words[0] in ("-V", "--version"):
        print(f"dsgpt {importlib.metadata.version('dsgpt')}")
        return
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    length = 2 if group else 1
    command = " ".join(words[:length])
    if group and words[1:2] in (["-h"], ["--help"]):
        print("\n".join(f"dsgpt {name}: {COMMANDS[name][1]}" for name in group))
        return
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS) or (f"; there is {', '.join(group)}" if group else "; see dsgpt --help")
        raise UserError(f"{command}: is not a command of dsgpt{hint}")
    _run(command, words[length:])


def _run(command: str, words: Sequence[str]) -> None:
    """Run it in this process; a script ends the process with its own exit code."""
    target, *first = COMMANDS[command][0].split()
    Parser.command = f"dsgpt {command}"
    sys.argv[1:] = [*first, *words]
    if target.endswith(".py"):
        runpy.run_path(str(REPOSITORY / target), run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _complete() -> None:
    """Complete the words before the cursor: a command here, its flags by its own parser."""
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    typed = line.split()[1:]
    for command in COMMANDS:
        parts = command.split()
        if typed[: len(parts)] == parts and (len(typed) > len(parts) or line.endswith(" ")):
            os.environ[COMPLETING] = str(int(os.environ[COMPLETING]) + len(parts))
            _run(command, [])
            return
    begun = "" if line.endswith(" ") else typed.pop() if typed else ""
    candidates = {command.split()[len(typed)] for command in COMMANDS if command.split()[: len(typed)] == typed}
    with os.fdopen(8, "w") as answer:  # where the shell's function of argcomplete reads
        answer.write("\v".join(sorted(word for word in candidates if word.startswith(begun))))


def script() -> None:
    """The console script ``dsgpt``."""
    run_script(main)


if __name__ == "__main__":
    script()
