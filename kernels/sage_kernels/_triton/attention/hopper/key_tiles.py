"""Which key tiles a program visits, read from `Seen`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..key_tiles import tile_at


@gluon.jit
def seen_tile(i, seen, MASKING: gl.constexpr):
    """The i-th visited key tile: the wholly visible ones come first; in mixed attention promoted ones last."""
    if MASKING.mask == "tiles" or MASKING.mask == "blocks":  # of a list that programs share
        tile = tile_at(
            seen.first + i, seen.tiles_ptr, seen.n_tiles, 0, 0, seen.first_full, MASKING.mask, MASKING.has_left
        )  # fmt: skip
    else:
        tile = tile_at(
            i, seen.tiles_ptr, seen.n_tiles, seen.first, seen.first_full, seen.full, MASKING.mask, MASKING.has_left
        )  # fmt: skip
    return tile
