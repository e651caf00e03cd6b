"""Which weights count as whole on a rank, for checks that all ranks hold the same."""

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from dsgpt.machine.topology import read_topology
from dsgpt.strategies.deepspeed.zero import Zero


def test_weights_that_are_still_being_gathered_are_left_out():
    """ZeRO-3 gathers weights for the next pass. The memory has its full size before the other ranks' parts arrive."""
    strategy = object.__new__(Zero)
    strategy._topology = read_topology({})
    strategy._parameters = {}
    for name, status in (("kept", ZeroParamStatus.AVAILABLE), ("coming", ZeroParamStatus.INFLIGHT)):
        strategy._parameters[name] = nn.Parameter(torch.ones(3))
        strategy._parameters[name].ds_shape, strategy._parameters[name].ds_status = torch.Size([3]), status
    strategy._parameters["split"] = nn.Parameter(torch.empty(0))
    strategy._parameters["split"].ds_shape, strategy._parameters["split"].ds_status = (
        torch.Size([3]),
        ZeroParamStatus.NOT_AVAILABLE,
    )
    strategy._parameters["plain"] = nn.Parameter(torch.ones(3))
    assert [name for name, _ in strategy.replicated_weights()] == ["kept", "plain"]
