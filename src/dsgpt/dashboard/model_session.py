"""Text from the checkpoints of the runs that were found. Imports torch only when a text is asked for."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST
from dsgpt.common.errors import UserError
from dsgpt.dashboard.runs import Kept, inside
from dsgpt.inference.commands import GenerateRequest as Request

if TYPE_CHECKING:
    from dsgpt.inference.generation import Candidate
    from dsgpt.inference.sample import Opened


MODELS = 2
"""That stay in memory, over all sessions."""
CANDIDATES = 10
STOPPED = "stopped"
_FILES = (MANIFEST, store.WEIGHTS, store.MODEL)
_LABELS = {
    "prompt": "Prompt",
    "checkpoint": "Checkpoint",
    "max_new_tokens": "New tokens",
    "temperature": "Temperature",
    "top_k": "Top k",
    "top_p": "Top p",
    "min_p": "Min p",
    "repetition_penalty": "Repetition penalty",
    "seed": "Seed",
    "stop": "Stop text",
    "precision": "Precision",
}


@dataclass(kw_only=True)
class Answer:
    """A text of one checkpoint, while it is generated and afterwards."""

    name: str
    """The checkpoint's."""
    prompt: str
    text: str = ""
    """Prompt included."""
    ids: tuple[int, ...] = ()
    """That were generated; known at the end."""
    ended: str = STOPPED
    """Why, as ``dsgpt.inference.sample.Text`` says; ``stopped`` until it ends by itself."""
    tokens: int = 0
    seconds: float = 0.0
    """From the prompt to the last token, without loading the model."""
    refused: str = ""
    """Why there is no text."""
    likeliest: list[tuple[str, "Candidate"]] = field(default_factory=list)
    """The ids that the model finds likeliest after the prompt, and their text."""

    @property
    def tokens_per_sec(self) -> float | None:
        """None before the first token."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


def checkpoints_of(folder: Path, runs: Sequence[str]) -> list[str]:
    """The names of all checkpoints, ``run/step-00000200``, the newest of each run first."""
    return [f"{run}/{path.name}" for run in runs for path in store.checkpoints(folder / run)]


def answer(told: Answer, request: Request, models: "Kept[Opened]", *, show: Callable[[], None] = lambda: None) -> None:
    """Generate the text of ``told`` as ``src/generate.py`` does; ``show`` is called after every token.

    What ``show`` raises ends the text as it is. A request or checkpoint that cannot be used is noted in ``told``.
    """
    from dsgpt.inference.sample import Writer, open_model  # noqa: PLC0415 - torch takes seconds

    try:
        made = (request.precision, request.device, request.quantize, request.compile)
        opened = models.get((_identity(request.checkpoint), *made), lambda: open_model(request))
        writer = Writer(request, opened=opened)
        told.likeliest = _likeliest(opened, request, told.prompt)
        began = time.monotonic()

        def add(piece: str) -> None:
            told.text += piece
            told.seconds = time.monotonic() - began
            show()
            told.tokens += 1  # the first piece is the prompt, and the last has no token

        for text in writer.texts([told.prompt], show=add):
            told.text, told.ended, told.ids = str(text), text.ended, text.ids
        told.tokens = len(told.ids)
    except UserError as error:
        told.refused = " ".join(in_page(line) for line in error.problems)


def in_page(line: str) -> str:
    """A refusal of ``src/generate.py`` with the labels of the page instead of flags."""
    line = re.sub(r"^--checkpoint (.*?): ", r"\1: ", line)
    return re.sub(r"--([a-z_]+)", lambda flag: _LABELS.get(flag[1], flag[0]), line)


def path_of(folder: Path, name: str) -> Path:
    """The checkpoint of this name.

    Raises:
        UserError: it is not inside of ``folder``, or gone.
    """
    return inside(folder, name)


def _identity(checkpoint: Path) -> tuple[object, ...]:
    """Another one for every version of the checkpoint's files."""
    found: list[object] = [str(checkpoint)]
    for name in _FILES:
        try:
            facts = (checkpoint / name).stat()
        except OSError:  # opening the model says what is missing
            continue
        found.append((name, facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size))
    return tuple(found)


def _likeliest(opened: "Opened", request: Request, prompt: str) -> list[tuple[str, "Candidate"]]:
    from dsgpt.inference.generation import likeliest  # noqa: PLC0415 - torch takes seconds
    from dsgpt.inference.sample import encode_prompt  # noqa: PLC0415

    tokenizer = opened.tokenizer
    ids = encode_prompt(prompt, tokenizer, opened.config)
    found = likeliest(opened.decoder, ids, count=CANDIDATES, sampling=request)
    return [(_token_text(tokenizer.decode([each.id])), each) for each in found]


def _token_text(text: object) -> str:
    """A token so that spaces and line breaks are seen."""
    return str(text).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
