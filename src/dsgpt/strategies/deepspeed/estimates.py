"""DeepSpeed's own estimates of the memory of model state, to compare with ``dsgpt.planning``."""


def estimated_bytes(*, stage: int, elements: int, largest: int, ranks: int, offload: bool) -> int:
    """Bytes on the device of a rank, by ``estimate_zero2_model_states_mem_needs`` or that of stage 3.

    They are of model state in fp16 or bf16 with Adam, whatever the run's precision and batch are.

    Args:
        stage: 2 or 3.
        elements: of all parameters.
        largest: elements of the largest layer.
        ranks: on one machine.
        offload: whether optimizer state, and at stage 3 weights, are in host memory.
    """
    if stage == 2:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs  # noqa: PLC0415

        _, device = estimate_zero2_model_states_mem_needs(elements, num_gpus_per_node=ranks, cpu_offload=offload)
        return int(device)
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs  # noqa: PLC0415

    _, device, _ = estimate_zero3_model_states_mem_needs(
        elements, largest, num_gpus_per_node=ranks, cpu_offload=offload, cpu_offload_params=offload
    )
    return int(device)
