"""Copies of a model that share its weights, one for each thread that computes with it."""

import copy
import itertools
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def twin_of(model: M) -> M:
    """A copy of ``model`` with the same tensors and a configuration of its own.

    During a forward pass of the paged engine, transformers 5.23 keeps ``is_causal = False`` in the configuration. With
    one configuration in two threads it can stay there, and the attention of every later pass without a mask is no
    longer causal.
    """
    shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)
