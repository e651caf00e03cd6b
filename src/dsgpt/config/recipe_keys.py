"""Which keys of DeepSpeed's JSON a recipe may hold, and why the others are refused (DeepSpeed 0.19.8's schema)."""

SHARED_KEYS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "fp16",
    "bf16",
    "steps_per_print",
    "activation_checkpointing",
    "dsgpt",
}
"""Keys that rule every strategy."""

DEEPSPEED_KEYS = {
    "zero_optimization": "object",
    "zero_allow_untested_optimizer": "boolean",
    "zero_force_ds_cpu_optimizer": "boolean",
    "wall_clock_breakdown": "boolean",
    "memory_breakdown": "boolean",
    "dump_state": "boolean",
    "aio": "object",
}
"""Keys of DeepSpeed alone, with the kinds of their values; they mean nothing to other strategies.

They change how a step is computed and not what is computed, with one exception inside ``zero_optimization``: Zero++'s
``zero_quantized_weights`` and ``zero_quantized_gradients`` round what travels, so that the training is another one.
"""

PARALLEL_KEYS = ("tensor_parallel", "pipeline", "sequence_parallel_size")
"""Keys that split the model or its sequences over ranks under DeepSpeed; strategies tell DeepSpeed what it needs."""

REFUSED_TENSOR_KEYS = dict.fromkeys(
    ("enabled", "tp_size", "tp", "tp_grain_size", "mpu", "keep_module_on_host", "injection_policy", "partition_config"),
    "how GPT-2's layers are split is known here; give autotp_size alone",
)

PIPELINE_LAYERS = ("Embedding", "PositionEmbedding", "StageBlock", "LayerNorm")
"""Names of the layers that a pipeline deals to stages, for patterns in ``pipeline.partition``."""

REFUSED_PIPELINE_KEYS = dict.fromkeys(
    ("seed_layers", "activation_checkpoint_interval", "pipe_partitioned", "grad_partitioned", "use_reentrant"),
    "give stages and partition alone",
)

ACTIVATION_CHECKPOINTING_KEYS = {
    "partition_activations",
    "cpu_checkpointing",
    "contiguous_memory_optimization",
    "number_checkpoints",
    "synchronize_checkpoint_boundary",
    "profile",
}

REFUSED_KEYS = {
    "amp": "use a bf16 or fp16 block",
    "torch_autocast": "use a bf16 or fp16 block, which mean the same under every strategy",
    "data_types": "gradients are always accumulated in fp32, so that strategies can be compared; leave it out",
    "gradient_allreduce_op": "a sum over ranks would make the gradient depend on their number; leave it out",
    "managed_gradient_accumulation": "accumulation follows gradient_accumulation_steps; leave it out",
    "sparse_gradients": "GPT-2's tied embedding has dense gradients; leave it out",
    "dataloader_drop_last": "the data order is the same under every strategy; leave it out",
    "elasticity": "DeepSpeed is removing it; resume with --resume instead",
    "compression_training": "DeepSpeed is removing it",
    "curriculum_learning": "it changes which samples are seen; leave it out",
    "data_efficiency": "it changes which samples are seen; leave it out",
    "communication_data_type": "another type rounds the gradients otherwise; leave it out",
    "prescale_gradients": "it rounds the gradients otherwise; leave it out",
    "gradient_predivide_factor": "it rounds the gradients otherwise; leave it out",
    "comms_logger": "it is not in this version; leave it out",
    "flops_profiler": "it is not in this version; leave it out",
    "log_level": "this program decides what is printed; leave it out",
    "autotuning": "leave it out",
}
"""Keys that DeepSpeed knows and that would break the promise of equal work, or are not built here; with the cure."""

OPTIMIZER_PARAMS = {
    "AdamW": {"lr", "betas", "eps", "weight_decay", "torch_adam"},
    "SGD": {"lr", "momentum", "nesterov", "weight_decay"},
}

SCHEDULER_PARAMS = {
    "WarmupLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"},
    "WarmupDecayLR": {"total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"},
    "WarmupCosineLR": {"total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"},
}

PRECISION_KEYS = {
    "bf16": {"enabled", "check_grad_overflow", "immediate_grad_update"},
    "fp16": {
        "enabled",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    },
}

ZERO_KEYS = {
    "stage": "",
    "contiguous_gradients": "boolean",
    "reduce_scatter": "boolean",
    "reduce_bucket_size": "positive",
    "use_multi_rank_bucket_allreduce": "boolean",
    "allgather_partitions": "boolean",
    "allgather_bucket_size": "positive",
    "overlap_comm": "boolean",
    "load_from_fp32_weights": "boolean",
    "offload_param": "object",
    "offload_optimizer": "object",
    "sub_group_size": "count",
    "stage3_prefetch_bucket_size": "count",
    "stage3_param_persistence_threshold": "count",
    "stage3_model_persistence_threshold": "count",
    "stage3_max_live_parameters": "count",
    "stage3_max_reuse_distance": "count",
    "stage3_gather_16bit_weights_on_model_save": "boolean",
    "stage3_allgather_sequential": "boolean",
    "ignore_unused_parameters": "boolean",
    "memory_efficient_linear": "boolean",
    "log_trace_cache_warnings": "boolean",
    "zero_hpz_partition_size": "",
    "zero_quantized_weights": "boolean",
    "zero_quantized_gradients": "boolean",
}
"""Keys of ``zero_optimization`` and the kinds of their values; "" where the reader checks more than the kind."""

REFUSED_ZERO_KEYS = {
    "round_robin_gradients": "DeepSpeed then no longer knows which parameter lies where, and would save wrong weights; "
    "leave it out",
}
"""``_link_all_hp_params`` of stages 1 and 2 looks for the parameters in the order that they had before."""

OFFLOAD_OPTIMIZER_KEYS = {
    "device": "",
    "nvme_path": "text",
    "buffer_count": "count",
    "pin_memory": "boolean",
    "pipeline_read": "boolean",
    "pipeline_write": "boolean",
    "fast_init": "boolean",
}

OFFLOAD_PARAM_KEYS = {
    "device": "",
    "nvme_path": "text",
    "buffer_count": "count",
    "buffer_size": "count",
    "max_in_cpu": "count",
    "pin_memory": "boolean",
}

AIO_KEYS = {
    "block_size": "",
    "queue_depth": "positive",
    "intra_op_parallelism": "positive",
    "single_submit": "boolean",
    "overlap_events": "boolean",
}

REFUSED_AIO_KEYS = {"use_gds": "reading past the CPU needs a driver that is not probed here; leave it out"}

AIO_BLOCK_MULTIPLE = 4096
"""Direct I/O takes whole sectors of the drive, which have up to so many bytes."""
