"""One of two processes that share a model's tokens: `python parallel_models.py RANK FILE` prints rows.

FILE: where the two meet. Each runs the model once without the other, and then in parallel, several steps of a run.
"""

from __future__ import annotations

import contextlib
import json
import sys

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel

import sage_processors as sp
from sage_kernels.testing import sqnr_db
from sage_processors.diffusion.discovery import attention_modules
from tests.diffusion.context_parallel import parallel_config
from tests.diffusion.test_apply_pipelines import flux_pipe


STEPS = 3


@contextlib.contextmanager
def spread(model, parallel, attention=True):
    """What model.enable_parallelism does, which asks for a GPU. attention: whether attention is told of it."""

    def tell(config):
        for _, module in attention_modules(model):
            module.processor._parallel_config = config

    apply_context_parallel(model, parallel.context_parallel_config, model._cp_plan)
    tell(parallel if attention else None)
    yield
    tell(None)
    remove_context_parallel(model, model._cp_plan)


def main(rank: int, file: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{file}")
    for kind in ("ulysses", "ring"):
        parallel = parallel_config(kind, rank)
        for name, options in CASES.items():
            dist.barrier()
            row = {"kind": kind, "case": name} | case(parallel, **options)
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


CASES: dict = {
    "planned": {},
    "per_token": {"scaling": "dynamic"},
    "fp8": {"recipe": "qk_int8_pv_fp8"},
    "rotated": {"rotation": "hadamard"},
    "windows": {"keep_first_steps": 1, "policy": "strict"},
    "kept": {"keep_layers": ("*single*",), "policy": "strict"},
    "backend": {"backend": "sage_int8"},
}


def case(parallel, backend=None, **options) -> dict:
    pipe, draw = flux_pipe()
    model = pipe.transformer
    for name, parameter in model.named_parameters():  # so that attention decides something
        if name.endswith(("to_v.weight", "to_out.0.weight", "to_q.weight", "to_k.weight", "proj_out.weight")):
            parameter.data *= 4
    exact = draw(STEPS)
    if backend is not None:
        sp.register_diffusers_backend(min_tokens=0)
        model.set_attention_backend(backend)
    with sp.apply(pipe, sp.SageAttnProcessor(min_tokens=0, **options)) as handle:
        alone = draw(STEPS)
        with spread(model, parallel, attention=False):
            apart = draw(STEPS)
        handle.reset()
        with spread(model, parallel):
            together, again = draw(STEPS), draw(STEPS)
            report = handle.report()
        site = next(iter(model.attn_processors.values()))._sage_sites[0]
        planned = [] if site.state is None else site.state.plan_scale[: site.kv_heads].nonzero().flatten().tolist()
    if backend is not None:
        sp.unregister_diffusers_backend()
        model.reset_attention_backend()
    first = report.rows[0]
    return {
        "to_alone": sqnr_db(together, alone),
        "alone_to_exact": sqnr_db(alone, exact),
        "to_exact": sqnr_db(together, exact),
        "apart": sqnr_db(apart, alone),
        "repeats": torch.equal(together, again),
        "sum": float(together.double().sum()),
        "calls": first["calls"],
        "dynamic": first["dynamic_calls"],
        "planned": planned,
        "fallbacks": report.fallbacks,
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
