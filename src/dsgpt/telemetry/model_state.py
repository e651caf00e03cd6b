"""How many bytes of model state a rank holds, and on which device, counted in storages: views add nothing."""

from collections.abc import Iterable, Mapping

from torch import Tensor

StateBytes = dict[str, dict[str, int]]
"""Bytes by category and device type, for example ``{"optimizer": {"cpu": 4096}}``."""


def state_bytes(categories: Mapping[str, Iterable[Tensor]]) -> StateBytes:
    """Bytes of the storages under the tensors of each category.

    A storage counts whole and once, in the first category that has a tensor of it: views of a flat buffer, or gradients
    that live in a bucket, are the buffer. Categories without bytes are there with no device.
    """
    seen: set[tuple[str, int]] = set()
    totals: StateBytes = {}
    for category, tensors in categories.items():
        by_device = totals.setdefault(category, {})
        for tensor in tensors:
            storage, kind = tensor.untyped_storage(), tensor.device.type
            place = (str(tensor.device), storage.data_ptr())
            if storage.nbytes() and place not in seen:
                seen.add(place)
                by_device[kind] = by_device.get(kind, 0) + storage.nbytes()
    return totals
