"""Time all candidate tiles of the attention kernel on this GPU, to choose the rows of tiles.py.

    python kernels/benchmarks/bench_tiles.py
    python kernels/benchmarks/bench_tiles.py --width 128 --scaling planned --seq 8192 --seq 16384
    python kernels/benchmarks/bench_tiles.py --recipe qk_int8_pv_fp8

Prints a line per tile, the fastest first. Each is checked against fp64 attention before it is timed. Saves nothing:
the row of results.csv is made by `bench.py` with the tile that was chosen. Needed again for a new GPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
import triton
from bench import MAX_ERROR, exact_rows, make_inputs, options_of, torch_sdpa
from cases import square
from torch.nn.attention import SDPBackend

from sage_kernels import DEFAULT_RECIPE, RECIPES
from sage_kernels._triton.attention.launch import launch_attention_fwd
from sage_kernels._triton.attention.tiles import Tile
from sage_kernels.facts.masking import make_masking
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import relative_l2


def candidates(width: int, pv: str) -> list[Tile]:
    """Return tiles worth a try on Hopper. Those that need too much shared memory are left out."""
    first = (False, True) if pv == "16bit" else (False,)  # with 8-bit P, the state says if row maxima are kept
    sizes = [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3)]
    tiles = [Tile(*size, "tma", keep) for size in sizes for keep in first]
    hopper = [(m, n, 4, buffers) for m, n in ((128, 64), (128, 128), (192, 64)) for buffers in (2, 3, 4, 6)]
    tiles += [Tile(*size, "hopper", keep) for size in hopper for keep in first]
    bytes_a_token = 3 if pv == "16bit" else 2  # of K and V, per channel; Q has one byte
    return [
        tile for tile in tiles if width * (tile.block_n * tile.num_stages * bytes_a_token + tile.block_m) < 225_000
    ]


def time_tiles(case, scaling: str, recipe: str) -> None:
    pv = RECIPES[recipe].pv
    q, k, v = make_inputs(case, torch.bfloat16)
    options = options_of(case)
    exact = exact_rows(case, q, k, v)
    cudnn = torch_sdpa(case, SDPBackend.CUDNN_ATTENTION, **options)
    cudnn_ms = triton.testing.do_bench(lambda: cudnn(q, k, v), warmup=50, rep=200, return_mode="median")
    masking, _ = make_masking(None, options.get("causal", ""), None, 0.0, None, case.seq_q, case.seq_kv)
    state = None
    if scaling == "planned":
        scales = ScaleState([Site("bench", case.kv_heads, case.head_dim)], device=q.device)
        state = scales.head_state(0)
        if pv != "16bit":
            unknown = q.new_full((case.batch, case.heads, case.seq_q), -torch.inf).float()
            state = state.keeping(unknown, known=True)
    rows = []
    for tile in candidates(case.head_dim, pv):

        def run(tile=tile):
            return launch_attention_fwd(
                q, k, v, scale=case.head_dim**-0.5, scaling=scaling, smooth_k=True, state=state, return_lse=False,
                recipe=recipe, masking=masking, tile=tile,
            )[0]  # fmt: skip

        try:
            out = run()
            if state is not None:
                scales.advance(1.0, 0.9)
                out = run()
        except Exception as error:  # a tile that does not compile is a result, too
            print(f"{case.name} {scaling} {tile}: {type(error).__name__}", flush=True)
            continue
        error = float(relative_l2(out[:, -exact.shape[1] :], exact))
        if not error <= MAX_ERROR[pv]:
            print(f"FAILED {case.name} {scaling} {tile}: relative L2 {error:.3g}", flush=True)
            continue
        ms = triton.testing.do_bench(run, warmup=30, rep=150, return_mode="median")
        rows.append((cudnn_ms / ms, tile, error))
    for ratio, tile, error in sorted(rows, reverse=True):
        print(f"{case.name:20} {recipe} {scaling:9} {ratio:.3f}x cuDNN  {error:.4f}  {tile}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, action="append", help="head dim, 64 or 128; both by default")
    parser.add_argument("--scaling", action="append", help="planned, per_block, per_token; all by default")
    parser.add_argument("--seq", type=int, action="append", help="8192 by default")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--recipe", choices=sorted(RECIPES), default=DEFAULT_RECIPE)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_tiles.py times GPU kernels: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    for width in arguments.width or (128, 64):
        for seq in arguments.seq or (8192,):
            for scaling in arguments.scaling or ("planned", "per_block", "per_token"):
                time_tiles(square(width, seq, causal=arguments.causal), scaling, arguments.recipe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
