"""Sizes and numbers of the clips that `tiny_wan` is trained on."""

from __future__ import annotations

from typing import NamedTuple


class Clips(NamedTuple):
    """A size of clips: pixels a side, frames, clips per step, clips kept as latents."""

    pixels: int
    frames: int
    batch: int
    pool: int


# 16,384 to 36,864 tokens per step: a model this small gains more from steps than from clips in a step
CLIPS = {
    "full": {
        "picture": Clips(64, 1, 256, 65536),
        "large_picture": Clips(128, 1, 64, 16384),
        "small": Clips(64, 17, 64, 16384),
        "long": Clips(128, 33, 6, 2048),
    },
    "probe": {"picture": Clips(32, 1, 16, 2048), "small": Clips(32, 9, 16, 2048)},
}
# sizes of the transformer's steps, in turn
PATTERN = {
    "full": {"pictures": ("picture", "picture", "large_picture"), "clips": ("small", "picture", "small", "long")},
    "probe": {"pictures": ("picture",), "clips": ("small",)},
}
# A VAE learns from steps, too: what it sees in a clip is the same everywhere. The larger clips are there for its
# attention over the picture and for what frames carry to later ones
VAE_CLIPS = {"full": (Clips(64, 9, 16, 0),) * 3 + (Clips(128, 17, 2, 0),), "probe": (Clips(32, 9, 8, 0),)}
POOL_CHUNK = {"picture": 512, "large_picture": 128, "small": 64, "long": 8}  # clips that are encoded at once
