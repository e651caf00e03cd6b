"""Write weights for other programs: ``.venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to hf OUT``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsgpt.common.command_line import choice, flag, read_options, require_flags, run_script
from dsgpt.config.options import EXPORT_DTYPES, EXPORT_FORMS, WHICH_CHECKPOINT

DESCRIPTION = """\
Write the model of a run, whichever strategy trained it, into a new folder. Needs no GPU, no network and no more memory
than its largest tensor; the run is only read.

  hf         what Hugging Face's libraries load: model.safetensors, config.json, generation_config.json and, if the
             training data had one, the tokenizer; the vocabulary's padding is cut off
  portable   the same weights under this project's own names: model.safetensors, model.json, tokenizer/ and a manifest
             with their hashes; generate.py takes it as --checkpoint. Weights alone: training cannot be resumed from it
  deepspeed  a checkpoint folder as DeepSpeed's ZeRO-2 saves it on one rank, for DeepSpeed's own zero_to_fp32.py and
             ds_to_universal.py: weights in fp32, and the optimizer's moments if there are any. Everything else
             (learning rate, loss scale, random state) is left out. The files are pickles, as DeepSpeed needs them;
             this program writes but never reads them"""

EXAMPLES = """\
examples:
  the newest checkpoint of a run, for transformers:
    .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to hf exported/demo
  the one with the lowest validation loss, at half the size:
    .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to hf --which best --dtype bf16 exported/demo-best
  one checkpoint of a run:
    .venv/bin/python src/convert.py --from checkpoint/demo-zero1/step-00000200 --to portable exported/demo-200
  one checkpoint for DeepSpeed's tools, and its weights by DeepSpeed's script:
    .venv/bin/python src/convert.py --from checkpoint/demo-zero1 --to deepspeed exported/demo-ds
    .venv/bin/python -m deepspeed.utils.zero_to_fp32 exported/demo-ds exported/demo-fp32
  published weights, to ask them for text with generate.py:
    .venv/bin/python src/convert.py --from downloads/gpt2 --to portable exported/gpt2

In Python: AutoModelForCausalLM.from_pretrained("exported/demo"). To train on, see --init_from of src/gpt2.py."""

KEPT = "nothing was written"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The command line."""

    source: Path = flag(
        Path,
        "DIR",
        "run folder, one checkpoint in it, or a Hugging Face folder of a GPT-2",
        name="--from",
        needs="a run folder such as checkpoint/demo-zero1",
    )
    form: str = flag(
        choice(EXPORT_FORMS),
        "FORM",
        "hf, portable or deepspeed, see above",
        name="--to",
        needs=f"one of {', '.join(EXPORT_FORMS)}",
    )
    dtype: str = flag(
        choice(EXPORT_DTYPES),
        "DTYPE",
        "of the weights: fp32, bf16 or fp16 (default: fp32, as trained); deepspeed is always fp32",
        default="fp32",
    )
    which: str = flag(
        choice(WHICH_CHECKPOINT),
        "WHICH",
        "checkpoint of a run: latest, or best by validation loss (default: latest)",
        default="latest",
    )
    out: Path = flag(
        Path,
        "OUT",
        "the folder to make; must not exist, or be empty",
        name="out",
        needs="the folder to make",
        nargs="?",
    )


def main(words: Sequence[str] | None = None) -> None:
    """Read the flags, convert, and print what was done."""
    options, problems = read_options(
        ConvertOptions,
        words,
        elsewhere={"--checkpoint": "give --from"},
        prog="convert.py",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    require_flags(options, problems)
    problems.raise_if_any()
    from dsgpt.inference.export import export  # noqa: PLC0415 - torch takes seconds; --help should not
    from dsgpt.machine.console import Console  # noqa: PLC0415

    export(
        options.source,
        options.out,
        form=options.form,
        dtype=options.dtype,
        which=options.which,
        console=Console(speaks=True),
    )


if __name__ == "__main__":
    run_script(main, kept=KEPT)
