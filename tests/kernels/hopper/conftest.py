"""The Hopper kernel for whatever a test calls: only on GPUs that have it."""

from __future__ import annotations

import pytest
import torch

from sage_kernels._triton.attention.tiles import Tile
from tests.kernels.attention.attention_cases import Attend


# two consumers of 64 query rows each, or three; as many buffers as 8-bit P has room for
TILES = {
    "two_running": (128, Tile(128, 128, 4, 3, "hopper")),
    "two_first": (128, Tile(128, 128, 4, 3, "hopper", True)),
    "three_first": (64, Tile(192, 64, 4, 5, "hopper", True)),
    "three_wide": (128, Tile(192, 64, 4, 4, "hopper", True)),
}


@pytest.fixture
def hopper_gpu():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.fixture(params=TILES)
def hopper(request, monkeypatch, hopper_gpu):
    """The op on the GPU, whose calls all take the Hopper kernel with one tile; 16-bit P with either reference."""
    from sage_kernels._triton.attention import launch as launch_attention

    head_dim, tile = TILES[request.param]
    monkeypatch.setattr(launch_attention, "device_tile", lambda *_, **__: tile)
    attend = Attend("cuda", monkeypatch)
    attend.head_dim, attend.tile = head_dim, tile
    return attend
