"""Stages 1 and 2 in fp32 without a second copy of the weights. Written for DeepSpeed 0.19.8."""

from typing import Any

import torch


def step_on_weights(optimizer: Any) -> None:
    """Let ``optimizer``, DeepSpeed's of stage 1 or 2, update the fp32 weights of the model in place.

    It clones this rank's part of the weights as master weights in every precision, and copies them back after each
    step. In fp32 the part itself serves: 4P/N bytes and one pass over the weights are saved. With offload the master
    weights are in other memory, and in bf16 and fp16 in another precision; those stay, like other optimizers.
    """
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer" or optimizer.cpu_offload:
        return
    for group, masters in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(group=optimizer.real_dp_process_group[group])
        part = optimizer.parallel_partitioned_bit16_groups[group][rank]
        if part.dtype == masters.dtype:
            masters.data = part
    optimizer._link_all_hp_params()  # each parameter's piece of the master weights
