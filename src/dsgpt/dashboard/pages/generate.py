"""A model that continues a prompt, or two of them side by side."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from dsgpt.common.errors import UserError
from dsgpt.dashboard.figures import aligned, figure, heading
from dsgpt.dashboard.formats import plain
from dsgpt.dashboard.model_session import MODELS, STOPPED, Answer, answer, checkpoints_of, path_of
from dsgpt.dashboard.runs import Kept, current_folder
from dsgpt.dashboard.summaries import contents_of
from dsgpt.inference.commands import GenerateRequest as Request

if TYPE_CHECKING:
    from dsgpt.inference.sample import Opened

_ANSWERS = "generate-answers"
_NONE = "no second checkpoint"
_BETWEEN_SEC = 0.05
"""Seconds between two updates of a text on the page."""


def show() -> None:
    """Show the page."""
    folder = current_folder()
    names = checkpoints_of(folder, contents_of(folder).runs)
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
    columns = aligned(len(answers))
    for number, (told, column) in enumerate(zip(answers, columns, strict=True)):
        with column:
            shown = _Shown(told, number)
            if asked is not None:
                shown.begin()
                answer(told, asked[number][2], _models(), show=shown.update)
            shown.finish()
    stop.empty()


@st.cache_resource
def _models() -> "Kept[Opened]":
    return Kept(MODELS)


def _asked(folder: Path, names: list[str]) -> list[tuple[str, str, Request]] | None:
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
        return [(name, prompt, Request(checkpoint=path_of(folder, name), **flags)) for name in chosen]
    except UserError as error:
        st.error(plain(str(error)))
        return None


def _sampling() -> dict[str, Any]:
    """How ids are drawn: the flags of ``src/generate.py`` and its defaults."""
    one, two, three = st.columns(3)
    found: dict[str, Any] = {
        "max_new_tokens": one.number_input("New tokens", 1, 4096, Request.max_new_tokens, key="generate-tokens"),
        "temperature": two.slider(
            "Temperature",
            0.0,
            2.0,
            Request.temperature,
            0.05,
            key="generate-temperature",
            help="0 always takes the likeliest token.",
        ),
        "seed": three.number_input("Seed", 0, (1 << 53) - 1, Request.seed, key="generate-seed"),
    }
    with st.expander("More about sampling"):
        four, five, six = st.columns(3)
        found["top_k"] = four.number_input("Top k", 1, 1 << 20, Request.top_k, key="generate-top-k")
        found["top_p"] = five.slider("Top p", 0.01, 1.0, Request.top_p, 0.01, key="generate-top-p")
        found["min_p"] = six.slider("Min p", 0.0, 0.99, Request.min_p, 0.01, key="generate-min-p")
        penalty = four.number_input(
            "Repetition penalty", 0.1, 10.0, Request.repetition_penalty, 0.1, key="generate-penalty"
        )
        stop = five.text_input("Stop text", key="generate-stop-text", help="The text ends before it.")
    return found | {"repetition_penalty": penalty, "stop": (stop,) if stop else ()}


class _Shown:
    """The place of an answer on the page."""

    def __init__(self, told: Answer, number: int) -> None:
        self._told, self._number = told, number
        self._updated = 0.0
        heading(told.name, level=2)
        self._text, self._speed = st.empty(), st.empty()

    def begin(self) -> None:
        """Say why there is no text yet."""
        self._speed.caption("Loading the model.")

    def update(self) -> None:
        """Show the text so far; a press of a button ends the script here."""
        if time.monotonic() - self._updated >= _BETWEEN_SEC:
            rate = self._told.tokens_per_sec
            self._draw(f"{self._told.tokens} tokens so far, {rate:,.0f} tokens/s" if rate else "Reads the prompt.")
            self._updated = time.monotonic()

    def finish(self) -> None:
        """Show the whole text, how it ended, and what the model found likeliest."""
        if self._told.refused:
            self._speed.error(plain(self._told.refused))
            return
        if not self._told.text:
            self._speed.caption("Not begun.")
            return
        told, rate = self._told, self._told.tokens_per_sec or 0.0
        self._draw(f"{told.tokens} tokens in {told.seconds:.1f} s, {rate:,.0f} tokens/s. {_ENDED[told.ended]}")
        if self._told.likeliest:
            _likeliest(self._told, self._number)

    def _draw(self, measured: str) -> None:
        self._text.code(self._told.text, language=None, wrap_lines=True)
        self._speed.caption(measured)


_ENDED = {
    STOPPED: "Not finished.",
    "end of text": "The model ended the text.",
    "stop": "Ended before the stop text.",
    "length": "Ended after the new tokens that were asked for.",
    "context": "Ended where the model's context is full.",
}


def _likeliest(told: Answer, number: int) -> None:
    ranks = [f"{rank}. {text}" for rank, (text, _) in enumerate(told.likeliest, start=1)]
    shares = [100 * each.probability for _, each in told.likeliest]
    figure(
        _BARS,
        points={"token": ranks, "probability": shares},
        numbers={
            "token": [text for text, _ in told.likeliest],
            "id": [each.id for _, each in told.likeliest],
            "probability, %": shares,
            "drawn with these settings, %": [100 * each.drawn for _, each in told.likeliest],
        },
        title="Likeliest first tokens after the prompt, %",
        alternative="A bar for each of the ten likeliest tokens, the likeliest on top.",
        key=f"generate-likeliest-{number}",
    )


_BARS: dict[str, Any] = {
    "mark": {"type": "bar", "tooltip": {"content": "data"}},
    "height": {"step": 24},
    "encoding": {
        "y": {"field": "token", "type": "nominal", "sort": None, "title": None},
        "x": {"field": "probability", "type": "quantitative", "title": "probability, %"},
    },
}
