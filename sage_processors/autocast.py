"""Autocast for the attention op, which PyTorch does not know by name."""

import torch


def is_autocast(device: torch.device) -> bool:
    """True if autocast is on there; PyTorch raises for "meta", where it never is."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast(query, key, value):
    """What autocast does to the inputs of scaled_dot_product_attention: all but fp64 and integers get its dtype."""
    if not is_autocast(query.device):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (query, key, value))
