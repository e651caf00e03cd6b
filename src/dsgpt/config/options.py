"""The values of the command line, and the words that its flags accept."""

from dataclasses import dataclass
from pathlib import Path

RUN_TYPES = ("baseline", "ddp", "fsdp", "optimized")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
DEVICES = ("auto", "cpu", "cuda")
SAVE_MODES = ("sync", "async")
ON_SAVE_FAILURE = ("stop", "continue")
ALLOW_CHANGED = ("data", "recipe")
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "csv")
WHICH_CHECKPOINT = ("latest", "best")
"""The newest checkpoint of a run, or the one with the lowest validation loss."""
EXPORT_FORMS = ("hf", "portable", "deepspeed")
EXPORT_DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One field per flag of ``src/gpt2.py``, with its default; None if it was not given and has no constant default."""

    run_type: str | None = None
    train_data_path: Path | None = None
    val_data_path: Path | None = None
    checkpoint_path: Path | None = None
    deepspeed_config: Path | None = None
    model_size: str | None = None
    init_from: str | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    embedding_size: int | None = None
    max_position_embeddings: int | None = None
    vocab_size: int | None = None
    dropout: float | None = None
    seq_length: int | None = None
    epochs: int | None = None
    max_train_steps: int | None = None
    max_val_steps: int | None = None
    global_batch_size: int | None = None
    micro_batch_size_per_gpu: int | None = None
    grad_accum_steps: int | None = None
    enforce_global_batch_size: bool = False
    precision: str = "auto"
    device: str = "auto"
    threads_per_device: int | None = None
    num_workers: int = 0
    compile: bool = False
    activation_checkpointing: bool = False
    steps_per_print: int | None = None
    monitor_every: float = 1.0
    profile_comm: int = 0
    profile: int = 0
    eval_every: int = 0
    save_every: int = 500
    keep_checkpoints: int = 2
    max_hours: float | None = None
    max_cost: float | None = None
    price_per_gpu_hour: float | None = None
    plan: Path | None = None
    on_event: tuple[str, ...] = ()
    save_mode: str = "sync"
    on_save_failure: str = "stop"
    track: tuple[str, ...] = ()
    seed: int = 1337
    resume: bool = False
    allow_changed: tuple[str, ...] = ()
    overwrite: bool = False
    verify_data: bool = False
    no_inference: bool = False
    dry_run: bool = False
    local_rank: int | None = None

    def model_overrides(self) -> dict[str, int | float]:
        """The given shape flags under the names of ``GPT2Config``."""
        given = {
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "n_embd": self.embedding_size,
            "block_size": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "dropout": self.dropout,
        }
        return {name: value for name, value in given.items() if value is not None}
