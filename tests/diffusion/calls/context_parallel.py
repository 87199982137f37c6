"""One of two processes that share the tokens of an attention call: `python context_parallel.py RANK FILE` prints rows.

FILE: where the two meet.
"""

from __future__ import annotations

import json
import sys

import diffusers
import torch
import torch.distributed as dist
from diffusers.models.attention_dispatch import dispatch_attention_fn

import sage_processors as sp
from sage_kernels.testing import exact_attention, sqnr_db


def parallel_config(kind: str, rank: int, device: str = "cpu"):
    """What model.enable_parallelism makes of ContextParallelConfig, which it can't on a CPU."""
    from diffusers.models._modeling_parallel import ParallelConfig

    config = diffusers.ContextParallelConfig(**{f"{kind}_degree": 2})
    names = {"mesh_dim_names": ("ring", "ulysses")}
    shape = (2, 1) if kind == "ring" else (1, 2)
    mesh = torch.distributed.device_mesh.init_device_mesh(device, shape, **names)
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(rank, 2, torch.device(device, rank) if device == "cuda" else torch.device(device), mesh=mesh)
    return parallel


def main(rank: int, file: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{file}")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 64, 4, 32) for _ in range(3))
    mask = torch.zeros(2, 1, 1, 64)
    mask[:, :, :, 50:] = -torch.inf
    for kind in ("ring", "ulysses"):
        parallel = parallel_config(kind, rank)
        for options in ({}, {"dtype": torch.float64}, {"mask": mask}, {"grad": True}, {"gqa": True}):
            sp.register_diffusers_backend(min_tokens=0)
            dtype, seen = options.get("dtype", torch.float32), options.get("mask")
            local = [x.to(dtype).chunk(2, 1)[rank] for x in (q, k, v)]
            local[0].requires_grad_(options.get("grad", False))
            row = {"kind": kind, "options": list(options)}
            try:
                out = dispatch_attention_fn(
                    *local, attn_mask=None if seen is None else seen.chunk(2, -1)[rank], backend="sage_int8",
                    enable_gqa=options.get("gqa", False), parallel_config=parallel,
                )  # fmt: skip
                want = exact_attention(q, k, v, mask=seen)[0].chunk(2, 1)[rank]
                row["db"] = sqnr_db(out.detach(), want)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"
            report = sp.diffusers_backend_report()
            print(json.dumps(row | {"calls": report.calls, "fallbacks": report.fallbacks}), flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
