"""Which process of which run is killed, and when; all of it follows from a seed."""

import random
from dataclasses import dataclass

from dsgpt.benchmarks.harness.cells import Cell
from dsgpt.config.options import SAVE_MODES

STEPS, SAVE_EVERY = 24, 4
"""Steps of every run of the campaign, and steps between its checkpoints."""
DROPOUT = 0.1
"""Not 0, so that a random stream that was not restored shows in the losses."""
KILLS, SEED = 40, 4
RUNS = {
    "baseline": Cell(strategy="baseline", ranks=1, accumulation=1),
    "ddp": Cell(strategy="ddp", ranks=2, accumulation=3),
    "zero1": Cell(strategy="zero1", ranks=2, accumulation=1),
    "zero3": Cell(strategy="zero3", ranks=2, accumulation=3),
    "pipeline2": Cell(strategy="pipeline2-zero1", ranks=2, accumulation=3),
}
"""The runs that are disturbed, by the name that pages and lines use."""
VICTIMS = ("one rank", "all", "the launcher")
MOMENTS = ("training", "saving")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """``kill -9`` of one or more processes of a run at an instant."""

    run: str
    """A key of ``RUNS``."""
    victim: str
    """One of ``VICTIMS``; a baseline is one process and has no launcher."""
    rank: int
    """Which rank, if the victim is one rank."""
    moment: str
    """One of ``MOMENTS``: while steps run, or while a checkpoint is written."""
    step: int
    """The kill comes after this step; or while its checkpoint is written, and then it is a multiple of
    ``SAVE_EVERY``."""
    fraction: float
    """How far into the next step, or into the save, 0 to 1."""
    save_mode: str

    @property
    def name(self) -> str:
        """The name in console lines, pages and test ids."""
        victim = f"rank {self.rank}" if self.victim == "one rank" else self.victim
        when = f"in the save of step {self.step}" if self.moment == "saving" else f"after step {self.step}"
        return f"{self.run}: {victim} {when} + {self.fraction:.2f}, {self.save_mode}"


def seeded_kills(count: int = KILLS, *, seed: int = SEED) -> list[Kill]:
    """``count`` kills, the same for the same seed; all runs, victims, moments and save modes take turns."""
    chance = random.Random(seed)
    return [_kill(chance, number, run=list(RUNS)[number % len(RUNS)]) for number in range(count)]


def _kill(chance: random.Random, number: int, *, run: str) -> Kill:
    turn, place = divmod(number, len(RUNS))
    moment = MOMENTS[turn % 2]
    saves = range(SAVE_EVERY, STEPS, SAVE_EVERY)
    return Kill(
        run=run,
        victim="one rank" if run == "baseline" else VICTIMS[(turn + place) % 3],
        rank=chance.randrange(RUNS[run].ranks),
        moment=moment,
        step=chance.choice(saves) if moment == "saving" else chance.randrange(1, STEPS - 1),
        fraction=chance.random(),
        save_mode=SAVE_MODES[(turn // 2 + place) % 2],
    )


def core_kills() -> list[Kill]:
    """The kills of ``make test``: each victim once, both moments."""
    return [
        Kill(run="ddp", victim="one rank", rank=1, moment="training", step=9, fraction=0.5, save_mode="async"),
        Kill(run="zero1", victim="all", rank=0, moment="saving", step=8, fraction=0.4, save_mode="sync"),
        Kill(run="pipeline2", victim="the launcher", rank=0, moment="training", step=6, fraction=0.2, save_mode="sync"),
    ]
