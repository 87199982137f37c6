"""Which key tiles a program visits, read from `Seen`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..key_tiles import tile_at


@gluon.jit
def seen_tile(i, seen, MASKING: gl.constexpr):
    """The i-th visited key tile: the wholly visible ones come first."""
    if MASKING.mask == "blocks":
        tile = gl.load(seen.tiles_ptr + _place_in_list(seen.first + i, seen))
    elif MASKING.mask == "tiles":  # of a list that programs share
        tile = tile_at(
            seen.first + i, seen.tiles_ptr, seen.n_tiles, 0, 0, seen.first_full, MASKING.mask, MASKING.has_left
        )  # fmt: skip
    else:
        tile = tile_at(
            i, seen.tiles_ptr, seen.n_tiles, seen.first, seen.first_full, seen.full, MASKING.mask, MASKING.has_left
        )  # fmt: skip
    return tile


@gluon.jit
def _place_in_list(j, seen):
    """Of mixed attention: ordinary tiles stand at the list's front, promoted ones at its end, from there. Visited are
    ordinary ones and then promoted ones that are seen wholly, then the other ordinary and the other promoted ones."""
    last = seen.n_tiles - 1
    rest = gl.where(
        j < seen.ordinary,
        j - (seen.promoted - seen.first_full),
        last - (j - (seen.ordinary - seen.promoted + seen.first_full)),
    )
    return gl.where(j < seen.first_full, j, gl.where(j < seen.promoted, last - (j - seen.first_full), rest))


@gluon.jit
def is_promoted(i, seen):
    """Whether the i-th visited key tile of mixed attention is a promoted one."""
    j = seen.first + i
    return ((j >= seen.first_full) & (j < seen.promoted)) | (j >= seen.ordinary)
