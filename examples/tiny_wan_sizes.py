"""Sizes and numbers of the clips that `tiny_wan` is trained on."""

from __future__ import annotations

from typing import NamedTuple


class Clips(NamedTuple):
    """A size of clips: pixels a side, frames, clips per step, clips kept as latents."""

    pixels: int
    frames: int
    batch: int
    pool: int


# 36,864 and 26,112 tokens per step: a model this small gains more from steps than from clips in a step
CLIPS = {
    "full": {"small": Clips(64, 17, 64, 16384), "long": Clips(128, 33, 6, 2048)},
    "probe": {"small": Clips(32, 9, 16, 2048)},
}
PATTERN = {"full": ("small", "small", "long"), "probe": ("small",)}  # sizes of the transformer's steps, in turn
# A VAE learns from steps, too: what it sees in a clip is the same everywhere. The larger clips are there for its
# attention over the picture and for what frames carry to later ones
VAE_CLIPS = {"full": (Clips(64, 9, 16, 0),) * 3 + (Clips(128, 17, 2, 0),), "probe": (Clips(32, 9, 8, 0),)}
POOL_CHUNK = {"small": 64, "long": 8}  # clips that are encoded at once
