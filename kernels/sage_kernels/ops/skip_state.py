"""Lists of key tiles to skip, made for the tiles of the kernels that will read them."""

from __future__ import annotations

import torch

from ..facts.recipe import DEFAULT_RECIPE, RECIPES
from ..facts.skipping import TOTAL_FIELDS, SkipState, empty_lists


REFERENCE_BLOCK = (128, 128)  # of the CPU path


def skip_block(device: torch.device, head_dim: int, recipe: str = DEFAULT_RECIPE) -> tuple[int, int]:
    """Return the query rows and keys of a tile of `sage_attention` with skip lists, on this device.

    Raises: NotImplementedError where the device can't run the recipe.
    """
    if device.type != "cuda":
        return REFERENCE_BLOCK
    from .._triton.attention.launch import tile_of_lists

    tile = tile_of_lists(device, head_dim, RECIPES[recipe].pv)
    return tile.block_m, tile.block_n


def new_skip_state(
    batch: int, heads: int, seq_q: int, seq_kv: int, head_dim: int, device: torch.device | str, *,
    recipe: str = DEFAULT_RECIPE, limit: float = 0.01, every: int = 8, compensates: bool = False,
) -> SkipState:  # fmt: skip
    """Make empty lists of key tiles to skip, for calls of one attention call site and shape.

    For `sage_attention(skip=)`. Between two denoising steps raise `now` by 1, in place. For another run raise it by
    `every` or more: all lists are then void.

    Args:
        batch, heads, seq_q, seq_kv, head_dim: of q [B, S_q, H, D] and k [B, S_kv, H_kv, D].
        recipe: of the calls.
        limit: largest share of a row's probability that its list may leave out, 0 <= limit < 1.
        every: each tile of query rows is measured again at least once in so many steps, >= 1.
        compensates: a skipped tile stands in the softmax as its mean key and value.
    Raises: ValueError for numbers out of range; NotImplementedError where the device can't run the recipe.
    """
    if not 0 <= limit < 1:
        raise ValueError(f"limit: got {limit}, expected 0 <= limit < 1")
    if every < 1:
        raise ValueError(f"every: got {every}, expected at least 1")
    device = torch.device(device)
    return empty_lists(
        batch, heads, seq_q, seq_kv, skip_block(device, head_dim, recipe), every=every, compensates=compensates,
        now=torch.zeros((), dtype=torch.int32, device=device),
        limit=torch.full((), float(limit), dtype=torch.float32, device=device),
        totals=torch.zeros(TOTAL_FIELDS, dtype=torch.int64, device=device),
    )  # fmt: skip
