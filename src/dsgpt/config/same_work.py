"""Which options, recipe keys and model fields change the training, and which do not.

Two runs did the same work if everything in ``COUNTED`` agrees. Each entry names the facts under which
``reports/work_facts.py`` reads it from a record. ``HARMLESS`` says why everything else may differ. A test compares both
with the fields of ``Options``, ``GPT2Config``, ``Recipe`` and its blocks: a new one must be added to one of them.

Names are ``--flag`` for an option, ``model.FIELD``, ``recipe.KEY`` for the top level of a recipe, and ``BLOCK.KEY`` for
a key in one of its blocks. Imports nothing, so that charts start fast.
"""

WORK_FACTS = (
    "global batch",
    "sequence length",
    "train data",
    "tokens in the train file",
    "validation data",
    "tokens in the validation file",
    "validation windows",
    "model n_layer",
    "model n_head",
    "model n_embd",
    "model block_size",
    "model vocab_size",
    "model dropout",
    "optimizer steps",
    "tokens",
    "precision",
)
"""Facts about the amount of work, in the order in which they are shown."""

TRAINING_FACTS = (
    "initial weights",
    "optimizer type",
    "optimizer settings",
    "learning rate",
    "scheduler",
    "gradient clipping",
    "loss scaling",
    "quantized communication",
    "seed",
    "changed at resume",
)
"""Facts that change the training, and not the amount of work."""

LATER_FACTS = frozenset(
    {
        "tokens in the train file",
        "tokens in the validation file",
        "validation windows",
        "optimizer settings",
        "initial weights",
        "loss scaling",
        "quantized communication",
        "changed at resume",
    }
)
"""Facts that records of generation 2.1 may lack. They are not compared if no run recorded them."""

RESUME_FACTS = frozenset({"quantized communication", "changed at resume"})
"""Those of ``LATER_FACTS`` that a resume may change. They are compared if a run was resumed."""

_LENGTH = ("optimizer steps", "scheduler")
_SETTINGS = ("optimizer settings",)
_SCHEDULER = ("scheduler",)
_SCALING = ("loss scaling",)
_QUANTIZED = ("quantized communication",)

COUNTED: dict[str, tuple[str, ...]] = {
    "--train_data_path": ("train data", "tokens in the train file"),
    "--val_data_path": ("validation data", "tokens in the validation file"),
    "--model_size": ("model n_layer", "model n_head", "model n_embd", "model block_size"),
    "--init_from": ("initial weights",),
    "--num_layers": ("model n_layer",),
    "--num_heads": ("model n_head",),
    "--embedding_size": ("model n_embd",),
    "--max_position_embeddings": ("model block_size",),
    "--vocab_size": ("model vocab_size",),
    "--dropout": ("model dropout",),
    "--seq_length": ("sequence length",),
    "--epochs": _LENGTH,
    "--max_train_steps": _LENGTH,
    "--max_val_steps": ("validation windows",),
    "--global_batch_size": ("global batch",),
    "--precision": ("precision",),
    "--seed": ("seed",),
    "--allow_changed": ("changed at resume",),
    "model.n_layer": ("model n_layer",),
    "model.n_head": ("model n_head",),
    "model.n_embd": ("model n_embd",),
    "model.block_size": ("model block_size",),
    "model.vocab_size": ("model vocab_size",),
    "model.dropout": ("model dropout",),
    "recipe.gradient_clipping": ("gradient clipping",),
    "recipe.train_batch_size": ("global batch",),
    "optimizer.type": ("optimizer type",),
    "optimizer.lr": ("learning rate",),
    "optimizer.betas": _SETTINGS,
    "optimizer.eps": _SETTINGS,
    "optimizer.weight_decay": _SETTINGS,
    "optimizer.momentum": _SETTINGS,
    "optimizer.nesterov": _SETTINGS,
    "scheduler.type": _SCHEDULER,
    "scheduler.total_num_steps": _SCHEDULER,
    "scheduler.warmup_num_steps": _SCHEDULER,
    "scheduler.warmup_type": _SCHEDULER,
    "scheduler.warmup_min_lr": _SCHEDULER,
    "scheduler.warmup_max_lr": _SCHEDULER,
    "scheduler.warmup_min_ratio": _SCHEDULER,
    "scheduler.cos_min_ratio": _SCHEDULER,
    "bf16.enabled": ("precision",),
    "fp16.enabled": ("precision",),
    "fp16.loss_scale": _SCALING,
    "fp16.initial_scale_power": _SCALING,
    "fp16.loss_scale_window": _SCALING,
    "fp16.hysteresis": _SCALING,
    "fp16.consecutive_hysteresis": _SCALING,
    "fp16.min_loss_scale": _SCALING,
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
}
"""What changes the training, with the facts. At least one of the facts then differs."""

_EXECUTES = "changes where a step is computed, not what is computed; the parity suite compares the losses"
_SPLIT = "splits the same global batch; sums over it differ only in order, which the parity suite bounds"
_PLACES = "changes where state is kept or how much is sent at once; the values are the same"
_PRINTS = "prints or measures"
_PROFILES = "measures some steps, which compute the same; figures of speed leave them out"
_SAVES = "changes when, where or how a state is written, not its values"
_SWAPS = "changes how files are read and written while state is swapped"
_NAMES = "a name; the entries of the file are judged one by one"
_RESUMES = "a resumed run is the same run; changes that were allowed count under --allow_changed"

HARMLESS: dict[str, str] = {
    "--run_type": _EXECUTES,
    "--checkpoint_path": _NAMES,
    "--deepspeed_config": _NAMES,
    "--micro_batch_size_per_gpu": _SPLIT,
    "--grad_accum_steps": _SPLIT,
    "--enforce_global_batch_size": _SPLIT,
    "--device": _EXECUTES,
    "--threads_per_device": _EXECUTES,
    "--num_workers": "reads the same windows in the same order with other processes",
    "--compile": "fuses kernels of the same formulas; the parity suite bounds the effect of rounding",
    "--activation_checkpointing": "computes the same activations, with the same dropout masks, a second time",
    "--steps_per_print": _PRINTS,
    "--monitor_every": _PRINTS,
    "--profile_comm": _PROFILES,
    "--profile": _PROFILES,
    "--eval_every": "changes how often a run validates, which changes no weight",
    "--save_every": _SAVES,
    "--keep_checkpoints": _SAVES,
    "--save_mode": _SAVES,
    "--on_save_failure": _SAVES,
    "--max_hours": _RESUMES,
    "--max_cost": _RESUMES,
    "--price_per_gpu_hour": _PRINTS,
    "--plan": _PRINTS,
    "--on_event": "calls another program, from which the training reads nothing",
    "--track": "copies figures that the run measures anyway to other programs; the training reads nothing from them",
    "--resume": _RESUMES,
    "--overwrite": "decides what happens to an earlier run in the folder",
    "--verify_data": "reads the data once more to check its hash; the hash itself counts",
    "--no_inference": "leaves out a measurement after the last step",
    "--dry_run": "trains nothing",
    "--local_rank": _EXECUTES,
    "recipe.path": _NAMES,
    "recipe.sha256": _NAMES,
    "recipe.raw": "the JSON as given; its keys are judged one by one",
    "recipe.train_micro_batch_size_per_gpu": _SPLIT,
    "recipe.gradient_accumulation_steps": _SPLIT,
    "recipe.steps_per_print": _PRINTS,
    "recipe.sequence_parallel_size": _EXECUTES,
    "recipe.zero_allow_untested_optimizer": "true in every run, whatever the recipe says",
    "recipe.zero_force_ds_cpu_optimizer": "chooses whose code computes the same optimizer",
    "recipe.wall_clock_breakdown": _PRINTS,
    "recipe.memory_breakdown": _PRINTS,
    "recipe.dump_state": _PRINTS,
    "tensor_parallel.autotp_size": _EXECUTES,
    "pipeline.stages": _EXECUTES,
    "pipeline.partition": _EXECUTES,
    "optimizer.torch_adam": "chooses whose code computes the same AdamW",
    "ddp.bucket_cap_mb": _PLACES,
    "ddp.gradient_as_bucket_view": _PLACES,
    "fsdp.reshard_after_forward": _PLACES,
    "fsdp.cpu_offload": _PLACES,
    "fsdp.reduce_dtype": (
        "rounds gradients between ranks no further than to the run's precision, which counts; ZeRO does so in every run"
    ),
    "bf16.check_grad_overflow": "a step whose gradients are not finite ends the run with or without it",
    "bf16.immediate_grad_update": "adds the same gradients to the same fp32 sums, earlier",
    "zero_optimization.stage": _EXECUTES,
    "zero_optimization.contiguous_gradients": _PLACES,
    "zero_optimization.reduce_scatter": "sends the same sums by another collective",
    "zero_optimization.reduce_bucket_size": _PLACES,
    "zero_optimization.use_multi_rank_bucket_allreduce": "sends the same sums by another collective",
    "zero_optimization.allgather_partitions": "sends the same weights by another collective",
    "zero_optimization.allgather_bucket_size": _PLACES,
    "zero_optimization.overlap_comm": "sends while computing; a run prints a note where no parity run has covered it",
    "zero_optimization.load_from_fp32_weights": "concerns DeepSpeed's own checkpoints, which are not used",
    "zero_optimization.sub_group_size": _PLACES,
    "zero_optimization.stage3_prefetch_bucket_size": _PLACES,
    "zero_optimization.stage3_param_persistence_threshold": _PLACES,
    "zero_optimization.stage3_model_persistence_threshold": _PLACES,
    "zero_optimization.stage3_max_live_parameters": _PLACES,
    "zero_optimization.stage3_max_reuse_distance": _PLACES,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "concerns DeepSpeed's own checkpoints",
    "zero_optimization.stage3_allgather_sequential": "sends the same weights in another order",
    "zero_optimization.ignore_unused_parameters": "GPT-2 uses every parameter in every step",
    "zero_optimization.memory_efficient_linear": "computes the same product and keeps less for the backward pass",
    "zero_optimization.log_trace_cache_warnings": _PRINTS,
    "zero_optimization.zero_hpz_partition_size": _PLACES,
    "offload_optimizer.device": _PLACES,
    "offload_optimizer.nvme_path": _SWAPS,
    "offload_optimizer.buffer_count": _SWAPS,
    "offload_optimizer.pin_memory": _PLACES,
    "offload_optimizer.pipeline_read": _SWAPS,
    "offload_optimizer.pipeline_write": _SWAPS,
    "offload_optimizer.fast_init": _SWAPS,
    "offload_param.device": _PLACES,
    "offload_param.nvme_path": _SWAPS,
    "offload_param.buffer_count": _SWAPS,
    "offload_param.buffer_size": _SWAPS,
    "offload_param.max_in_cpu": _PLACES,
    "offload_param.pin_memory": _PLACES,
    "aio.block_size": _SWAPS,
    "aio.queue_depth": _SWAPS,
    "aio.intra_op_parallelism": _SWAPS,
    "aio.single_submit": _SWAPS,
    "aio.overlap_events": _SWAPS,
    "activation_checkpointing.partition_activations": "must be false",
    "activation_checkpointing.cpu_checkpointing": "must be false",
    "activation_checkpointing.contiguous_memory_optimization": "must be false",
    "activation_checkpointing.number_checkpoints": "must be false",
    "activation_checkpointing.synchronize_checkpoint_boundary": "must be false",
    "activation_checkpointing.profile": "must be false",
}
"""What may differ between runs that did the same work, with the reason.

With dropout, another split over ranks or micro batches draws other masks. The work is the same; charts judge the losses
separately (``equal loss``).
"""

BLOCKS = {
    "recipe.optimizer": "optimizer",
    "recipe.scheduler": "scheduler",
    "recipe.fp16": "fp16",
    "recipe.bf16": "bf16",
    "recipe.dsgpt": "dsgpt",
    "recipe.tensor_parallel": "tensor_parallel",
    "recipe.pipeline": "pipeline",
    "recipe.zero_optimization": "zero_optimization",
    "recipe.aio": "aio",
    "recipe.activation_checkpointing": "activation_checkpointing",
    "dsgpt.ddp": "ddp",
    "dsgpt.fsdp": "fsdp",
    "zero_optimization.offload_optimizer": "offload_optimizer",
    "zero_optimization.offload_param": "offload_param",
}
"""The name of each block in ``COUNTED`` and ``HARMLESS``, where its keys are judged one by one.

The presence of the block ``activation_checkpointing`` does what ``--activation_checkpointing`` does.
"""
