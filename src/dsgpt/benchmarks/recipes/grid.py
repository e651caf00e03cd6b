"""The trainings of a search: a grid on one seed, then single changes of a good one, then the best on other seeds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

SEED, OTHER_SEEDS = 1337, (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The settings of one training."""

    batch: int
    """Sequences of a global batch."""
    lr: float
    warm_up: float = 0.05
    """Share of the steps."""
    beta2: float = 0.95
    weight_decay: float = 0.1
    floor: float = 0.1
    """The last rate, as a share of ``lr``."""
    seed: int = SEED

    def recipe(self, *, steps: int) -> dict[str, Any]:
        """The recipe of a training of ``steps`` steps."""
        return {
            "train_batch_size": self.batch,
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": self.lr,
                    "betas": [0.9, self.beta2],
                    "eps": 1e-8,
                    "weight_decay": self.weight_decay,
                },
            },
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "warmup_min_ratio": 0.0,
                    "warmup_num_steps": max(2, round(self.warm_up * steps)),
                    "cos_min_ratio": self.floor,
                    "warmup_type": "linear",
                },
            },
            "gradient_clipping": 1.0,
        }

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, for the record."""
        return asdict(self)

    def name(self) -> str:
        """For a folder and a console line."""
        return "-".join(f"{key}{value:g}" for key, value in asdict(self).items())


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched for a model size."""

    size: str
    length: int
    """Tokens of a sequence."""
    tokens: int
    """Of every training, whatever its batch."""
    batches: Sequence[int]
    rates: Sequence[float]
    changes: bool = True
    """Whether single changes of a good one are tried."""

    def grid(self) -> list[Trial]:
        """Every batch with every rate."""
        return [Trial(batch=batch, lr=lr) for batch in self.batches for lr in self.rates]

    def changes_of(self, good: Trial) -> list[Trial]:
        """A good one of the grid, with one other setting each."""
        changed = [
            replace(good, warm_up=0.02),
            replace(good, warm_up=0.1),
            replace(good, beta2=0.99),
            replace(good, floor=0.01),
            replace(good, weight_decay=0.01),
        ]
        return changed if self.changes else []

    def steps(self, trial: Trial) -> int:
        """Optimizer steps of a training."""
        return self.tokens // (trial.batch * self.length)


SEARCHES = {
    "demo": Search(size="demo", length=128, tokens=819_200, batches=(4, 8, 16), rates=(1e-3, 2e-3, 4e-3, 8e-3)),
    "tiny": Search(size="tiny", length=128, tokens=819_200, batches=(8,), rates=(1e-3, 2e-3, 4e-3), changes=False),
}
SHIPPED_BEFORE = Trial(batch=32, lr=6e-4, warm_up=0.25)
"""What ``ds_configs/zero1.json`` does in 200 steps, as the demo did."""


def other_seeds(best: Trial) -> list[Trial]:
    """The best on seeds that took no part in the choice."""
    return [replace(best, seed=seed) for seed in OTHER_SEEDS]
