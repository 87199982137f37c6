"""Autocast for the attention op, which PyTorch does not know by name."""

import torch


def autocast(query, key, value):
    """What autocast does to the inputs of scaled_dot_product_attention: all but fp64 and integers get its dtype."""
    if not torch.is_autocast_enabled(query.device.type):
        return query, key, value
    dtype = torch.get_autocast_dtype(query.device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (query, key, value))
