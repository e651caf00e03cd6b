"""Clients that ask a server for completions: at random instants, and again when it refuses them."""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from dsgpt.common.errors import UserError
from dsgpt.common.json_files import clipped_text

TIMEOUT_SEC = 300
MOST_ATTEMPTS = 200


@dataclass(frozen=True, kw_only=True)
class Served:
    """What became of one request."""

    prompt: int
    """Index of its prompt."""
    answers: int
    """Answers that it got: 1, unless something is wrong."""
    name: str
    """The server's name of the answer; empty without one."""
    text: str
    refusals: int
    """How often it was refused with 429."""
    accepted_sec: float
    """From the attempt that was accepted to its answer."""
    whole_sec: float
    """From the instant of the first attempt to the answer."""
    failure: str | None = None
    """Why there is no answer, one line."""


class Load:
    """Requests to one server.

    Args:
        url: of the server.
        model: its name in requests.
        prompts: request i asks for a completion of the prompt ``i % len(prompts)``.
        max_tokens: of a completion.
        seed: draws arrivals, and how much longer than asked a refused client waits.
    """

    def __init__(self, url: str, model: str, prompts: Sequence[str], *, max_tokens: int, seed: int) -> None:
        self._url, self._prompts, self._random = url, prompts, random.Random(seed)
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": 0}

    def steady(self, requests: int, *, clients: int) -> tuple[list[Served], float]:
        """``clients`` at a time, each as soon as an earlier one is answered; also returns the seconds of all.

        Raises:
            UserError: a request is not answered.
        """
        served, seconds = asyncio.run(self._all([0.0] * requests, clients=clients))
        if lost := [one.failure for one in served if one.failure]:
            raise UserError(f"src/serve.py does not answer {len(lost)} of {requests} requests: {lost[0]}")
        return served, seconds

    def poisson(self, instants: Sequence[float]) -> tuple[list[Served], float]:
        """A request at each of ``instants``; also returns the seconds until all are answered."""
        return asyncio.run(self._all(instants, clients=len(instants)))

    def instants(self, requests: int, *, per_sec: float) -> list[float]:
        """Random instants, ``per_sec`` a second in the mean, in seconds."""
        return list(itertools.accumulate(self._random.expovariate(per_sec) for _ in range(requests)))

    async def _all(self, instants: Sequence[float], *, clients: int) -> tuple[list[Served], float]:
        places, started = asyncio.Semaphore(clients), time.perf_counter()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
        async with httpx2.AsyncClient(base_url=self._url, timeout=TIMEOUT_SEC, limits=limits) as client:

            async def one(number: int, instant: float) -> Served:
                await asyncio.sleep(instant)
                async with places:
                    return await self._until_answered(client, number, begun=started + instant)

            served = await asyncio.gather(*(one(number, instant) for number, instant in enumerate(instants)))
        return list(served), time.perf_counter() - started

    async def _until_answered(self, client: httpx2.AsyncClient, number: int, *, begun: float) -> Served:
        """Ask, and as often as the server refuses, wait as long as it says and ask again."""
        prompt, asked = number % len(self._prompts), begun
        body = {**self._body, "prompt": self._prompts[prompt]}
        choices: list[dict[str, str]] = []
        name, failure, refusals = "", f"refused {MOST_ATTEMPTS} times", 0
        while refusals < MOST_ATTEMPTS:
            asked = time.perf_counter()
            try:
                answer = await client.post("/v1/completions", json=body)
            except httpx2.HTTPError as error:
                failure = f"{type(error).__name__}: {error}"
                break
            if answer.status_code != 429:
                if answer.status_code == 200:
                    found = answer.json()
                    choices, name = found["choices"], found["id"]
                failure = f"answered {answer.status_code}: {clipped_text(answer.text)}"
                break
            refusals += 1
            await asyncio.sleep(float(answer.headers["retry-after"]) * self._random.uniform(1, 2))
        ended = time.perf_counter()
        return Served(
            prompt=prompt,
            answers=len(choices),
            name=name,
            text=choices[0]["text"] if choices else "",
            refusals=refusals,
            accepted_sec=ended - asked,
            whole_sec=ended - begun,
            failure=None if choices else failure,
        )
