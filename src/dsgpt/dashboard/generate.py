"""The page "Try it": a model that continues a prompt, or two of them side by side. Torch is imported for a text."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from dsgpt.checkpoints import store
from dsgpt.checkpoints.manifest import MANIFEST
from dsgpt.common.errors import UserError
from dsgpt.dashboard import reading, ui
from dsgpt.inference.commands import GenerateRequest

if TYPE_CHECKING:
    from dsgpt.inference.generation import Candidate, Writer


MODELS = 2
"""Number of models that stay in memory, over all sessions."""
CANDIDATES = 10
STOPPED = "stopped"
_ANSWERS = "generate-answers"
_NONE = "no second checkpoint"
_BETWEEN_SEC = 0.05
"""Seconds between two updates of a text on the page."""
_ALIKE = ("prompt", "checkpoint", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "precision")
_LABELS = {name: name.replace("_", " ").capitalize() for name in _ALIKE}
_LABELS |= {"max_new_tokens": "New tokens", "stop": "Stop text"}
"""Labels of the page, by flag of ``src/generate.py``."""
_ENDED = {STOPPED: "Not finished.", "end of text": "The model ended the text.", "stop": "Ended before the stop text."}
_ENDED["length"] = "Ended after the new tokens that were asked for."
_ENDED["context"] = "Ended where the model's context is full."


@dataclass(kw_only=True)
class Answer:
    """A text of one checkpoint, while it is generated and afterwards."""

    name: str
    """The checkpoint's."""
    prompt: str
    text: str = ""
    """Prompt included."""
    ids: tuple[int, ...] = ()
    """Generated ids; known at the end."""
    ended: str = STOPPED
    """Why, as ``dsgpt.inference.generation.Text`` says; ``stopped`` until it ends by itself."""
    tokens: int = 0
    seconds: float = 0.0
    """Seconds from the prompt to the last token, without loading the model."""
    refused: str = ""
    """Why there is no text."""
    likeliest: list[tuple[str, "Candidate"]] = field(default_factory=list)
    """The ids that the model finds likeliest after the prompt, and their text."""

    @property
    def tokens_per_sec(self) -> float | None:
        """New tokens per second, the time of the prompt included; None before the first token."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None


def show() -> None:
    """Show the page."""
    folder = reading.current_folder()
    runs = reading.contents(folder).runs
    names = [f"{run}/{path.name}" for run in runs for path in store.checkpoints(folder / run)]  # the newest first
    if not names:
        st.info("No run here has a checkpoint yet. `make demo` trains two small models; then come back.")
        return
    asked, stop = _asked(folder, names), st.empty()
    if asked is not None:
        st.session_state[_ANSWERS] = [Answer(name=name, prompt=prompt) for name, prompt, _ in asked]
        stop.button("Stop", icon=":material/stop_circle:", key="generate-stop")
    answers: list[Answer] = st.session_state.get(_ANSWERS, [])
    if not answers:
        return
    with st.container(key="aligned"):  # elements of the columns begin at one height: ``style.css`` says how
        columns = st.columns(len(answers))
    for number, (answer, column) in enumerate(zip(answers, columns, strict=True)):
        with column:
            shown = _Shown(answer)
            if asked is not None:
                shown.speed.caption("Loading the model.")
                generate(answer, asked[number][2], show=shown.update)
            shown.finish(number)
    stop.empty()


def _asked(folder: Path, names: list[str]) -> list[tuple[str, str, GenerateRequest]] | None:
    """Name, prompt and request of each text, if the button was pressed."""
    with st.form("generate-form"):
        one, two = st.columns(2)
        first = one.selectbox("Checkpoint", names, key="generate-first")
        second = two.selectbox("Beside it", [_NONE, *names], key="generate-second")
        prompt = st.text_area("Prompt", "def main(", key="generate-prompt", height=100)
        flags = _sampling()
        pressed = st.form_submit_button("Generate", icon=":material/play_arrow:")
    if not pressed:
        return None
    chosen = [first] if second == _NONE else [first, second]
    try:
        return [(name, prompt, GenerateRequest(checkpoint=reading.inside(folder, name), **flags)) for name in chosen]
    except UserError as error:
        st.error(ui.plain(str(error)))
        return None


def _sampling() -> dict[str, Any]:
    """Values of the flags of ``src/generate.py`` for the draw, from the page."""
    one, two, three = st.columns(3)
    flags, usual, warm = dict[str, Any](), GenerateRequest, "0 always takes the likeliest token."
    flags["max_new_tokens"] = one.number_input("New tokens", 1, 4096, usual.max_new_tokens, key="generate-tokens")
    heat, penalty = usual.temperature, usual.repetition_penalty
    flags["temperature"] = two.slider("Temperature", 0.0, 2.0, heat, 0.05, key="generate-temperature", help=warm)
    flags["seed"] = three.number_input("Seed", 0, (1 << 53) - 1, usual.seed, key="generate-seed")
    with st.expander("More about sampling"):
        four, five, six = st.columns(3)
        flags["top_k"] = four.number_input("Top k", 1, 1 << 20, usual.top_k, key="generate-top-k")
        flags["top_p"] = five.slider("Top p", 0.01, 1.0, usual.top_p, 0.01, key="generate-top-p")
        flags["min_p"] = six.slider("Min p", 0.0, 0.99, usual.min_p, 0.01, key="generate-min-p")
        penalty = four.number_input("Repetition penalty", 0.1, 10.0, penalty, 0.1, key="generate-penalty")
        stop = five.text_input("Stop text", key="generate-stop-text", help="The text ends before it.")
    return flags | {"repetition_penalty": penalty, "stop": (stop,) if stop else ()}


class _Shown:
    """The place of an answer on the page."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self._updated = answer, 0.0
        ui.heading(answer.name, level=2)
        self._text, self.speed = st.empty(), st.empty()

    def update(self) -> None:
        """Show the text so far; a press of a button ends the script here."""
        if time.monotonic() - self._updated >= _BETWEEN_SEC:
            rate = self._answer.tokens_per_sec
            self._draw(f"{self._answer.tokens} tokens so far, {rate:,.0f} tokens/s" if rate else "Reads the prompt.")
            self._updated = time.monotonic()

    def finish(self, number: int) -> None:
        """Show the whole text, how it ended, and what the model found likeliest; ``number`` is the answer's."""
        answer, rate = self._answer, self._answer.tokens_per_sec or 0.0
        if answer.refused:
            self.speed.error(ui.plain(answer.refused))
        elif not answer.text:
            self.speed.caption("Not begun.")
        else:
            speed = f"{answer.tokens} tokens in {answer.seconds:.1f} s, {rate:,.0f} tokens/s"
            self._draw(f"{speed}. {_ENDED[answer.ended]}")
            if not answer.likeliest:
                return
            rows = []
            for token, each in answer.likeliest:
                row = {"token": token, "id": each.id, "probability, %": 100 * each.probability}
                rows.append(row | {"drawn with these settings, %": 100 * each.drawn})
            table = ui.columns(rows)
            names = [f"{rank}. {token}" for rank, token in enumerate(table["token"], start=1)]
            ui.figure(
                ui.parts("token", "probability", unit="probability, %"),
                points={"token": names, "probability": table["probability, %"]},
                numbers=table,
                title="Likeliest first tokens after the prompt, %",
                alternative="A bar for each of the ten likeliest tokens, the likeliest on top.",
                key=f"generate-likeliest-{number}",
            )

    def _draw(self, measured: str) -> None:
        self._text.code(self._answer.text, language=None, wrap_lines=True)
        self.speed.caption(measured)


def generate(answer: Answer, request: GenerateRequest, *, show: Callable[[], None] = lambda: None) -> None:
    """Generate the text of ``answer`` as ``src/generate.py`` does; ``show`` is called after every token.

    What ``show`` raises ends the text as it is. What is wrong with a request or checkpoint is noted in ``answer``, with
    the labels of the page instead of flags.
    """
    from dsgpt.inference.generation import encode_prompt, likeliest  # noqa: PLC0415 - torch takes seconds

    files: list[object] = []
    for path in (request.checkpoint / name for name in (MANIFEST, store.WEIGHTS, store.MODEL)):
        with suppress(OSError):  # opening the model says what is missing
            files += [path, reading.version_of(path)]
    try:
        made = request.precision, request.device, request.quantize, request.compile
        writer = _opened(files, *made, _request=request).asked(request)
        ids = encode_prompt(answer.prompt, writer.tokenizer, writer.config)
        for each in likeliest(writer.decoder(batch_size=1), ids, count=CANDIDATES, sampling=request.sampling):
            token = str(writer.tokenizer.decode([each.id])).replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
            answer.likeliest.append((token, each))
        began = time.monotonic()

        def add(piece: str) -> None:
            answer.text += piece
            answer.seconds = time.monotonic() - began
            show()
            answer.tokens += 1  # the first piece is the prompt, and the last has no token

        for text in writer.texts([answer.prompt], show=add):
            answer.text, answer.ended, answer.ids = str(text), text.ended, text.ids
        answer.tokens = len(answer.ids)
    except UserError as error:
        lines = (re.sub(r"^--checkpoint (.*?): ", r"\1: ", line) for line in error.problems)
        answer.refused = re.sub(r"--([a-z_]+)", lambda flag: _LABELS.get(flag[1], flag[0]), " ".join(lines))


@st.cache_resource(max_entries=MODELS, show_spinner=False)
def _opened(files: list[object], *made: object, _request: GenerateRequest) -> "Writer":  # noqa: ARG001 - they are the key
    """The model of a request, opened once for every version of its ``files`` and every way in which it is ``made``."""
    from dsgpt.inference.generation import Writer  # noqa: PLC0415 - torch takes seconds

    writer = Writer(_request)
    writer.decoder(batch_size=1)  # the requests share it
    return writer
