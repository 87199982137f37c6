"""Layers that `make sanitize` runs come to their end."""

from __future__ import annotations

from tests.kernels.codegen import sanitize


def test_no_linear_layer_has_tiles_that_its_kernel_waits_for_for_ever():
    """Whole tiles are a multiple of the programs where others are shared: types.Sizes of the Hopper matmul."""
    layers = [each for each in sanitize.selection() if isinstance(each, sanitize.LinearLaunch) and each.shared]
    assert len(layers) == 6
    for each in layers:
        block_m, block_n, *_ = sanitize.linear_tile(each)
        whole = -(-each.rows // block_m) * -(-sanitize.COLUMNS // block_n) - each.shared
        assert whole > 0 and whole % sanitize.PROCESSORS == 0, each
