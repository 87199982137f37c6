"""One of two processes that share a model's tokens: `python parallel_models.py RANK FILE DEVICE` prints rows.

FILE: where the two meet. DEVICE: cpu, or cuda, of which each process has one. Each runs the model once
without the other, and then in parallel, several steps of a run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models import attention_dispatch

import sage_processors as sp
from sage_kernels.testing import sqnr_db
from sage_processors.diffusion.host.discovery import attention_modules
from tests.diffusion.calls.context_parallel import parallel_config
from tests.support.tiny_models import MODELS
from tests.support.tiny_pipelines import flux_pipe


STEPS = 2


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


@contextlib.contextmanager
def counted_bytes():
    """A list that gets the bytes that leave this process, of every exchange of attention."""
    sent: list = []
    parts, ring = attention_dispatch._all_to_all_single, funcol.all_gather_tensor

    def counted(function, share):
        def call(*arguments, **options):
            sent.append(int(arguments[0].nbytes * share))
            return function(*arguments, **options)

        return call

    attention_dispatch._all_to_all_single = counted(parts, 0.5)  # half stays here
    attention_dispatch.funcol = SimpleNamespace(**vars(funcol) | {"all_gather_tensor": counted(ring, 1)})
    yield sent
    attention_dispatch._all_to_all_single, attention_dispatch.funcol = parts, funcol


def join(rank: int, file: str, device: str) -> None:
    """Meet the other process at a file."""
    options = {"rank": rank, "world_size": 2, "init_method": f"file://{file}"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        options["device_id"] = torch.device(device, rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)


def main(rank: int, file: str, device: str = "cpu") -> None:
    join(rank, file, device)
    for kind in ("ulysses", "ring"):
        parallel = parallel_config(kind, rank, device)
        if kind == "ulysses":
            print(json.dumps({"kind": kind, "case": "training"} | trained(parallel, device)), flush=True)
        print(json.dumps({"kind": kind, "case": "compiled"} | compiled(parallel, device)), flush=True)
        for name, options in CASES.items():
            dist.barrier()
            row = {"kind": kind, "case": name} | case(parallel, device, **options)
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def trained(parallel, device: str) -> dict:
    """A forward that needs gradients: exact, and with those of one process."""
    model, inputs = MODELS["flux"]()
    model, inputs = model.to(device), {name: x.to(device) for name, x in inputs.items()}
    weight = model.transformer_blocks[0].attn.to_q.weight.requires_grad_()

    def gradient():
        return torch.autograd.grad(model(**inputs, return_dict=False)[0].square().sum(), weight)[0]

    alone = gradient()
    with sp.apply(model, sp.SageAttnProcessor(training="int8", min_tokens=0)) as handle, spread(model, parallel):
        found = gradient()
        dist.all_reduce(found)  # each has the part of its own tokens
        fallbacks = handle.report().fallbacks
    return {"error": float((found - alone).norm() / alone.norm()), "fallbacks": fallbacks}


def compiled(parallel, device: str) -> dict:
    """One forward, eager and traced."""
    model, inputs = MODELS["flux"]()
    model, inputs = model.to(device), {name: x.to(device) for name, x in inputs.items()}
    config = sp.SageAttnProcessor(min_tokens=0)
    with torch.no_grad(), sp.apply(model, config) as handle, spread(model, parallel):
        eager = model(**inputs, return_dict=False)[0]
        torch._dynamo.reset()
        traced = torch.compile(model, backend="aot_eager")(**inputs, return_dict=False)[0]
        report = handle.report()
    layers = len(report.rows)
    return {"db": sqnr_db(traced, eager), "calls": report.calls / layers, "fallbacks": report.fallbacks}


CASES: dict = {
    "planned": {},
    "per_token": {"scaling": "dynamic"},
    "fp8": {"recipe": "qk_int8_pv_fp8"},
    "long": {"min_tokens": 28, "on_unsupported": "raise"},  # tokens of both devices
    "rotated": {"rotation": "hadamard"},
    "windows": {"on_unsupported": "raise", "keep": {"first_steps": 1}},
    "kept": {"on_unsupported": "raise", "layers": {"*single*": {"recipe": "16bit"}}},
    "backend": {"backend": "sage_int8"},
}


@functools.cache
def drawing(device: str):
    """(pipeline whose attention decides something, its drawing function, what it draws exactly)."""
    pipe, draw = flux_pipe()
    pipe.to(device)
    for name, parameter in pipe.transformer.named_parameters():
        if name.endswith(("to_v.weight", "to_out.0.weight", "to_q.weight", "to_k.weight", "proj_out.weight")):
            parameter.data *= 4
    return pipe, draw, draw(STEPS)


def case(parallel, device: str, backend=None, **options) -> dict:
    pipe, draw, exact = drawing(device)
    model, found = pipe.transformer, {}
    if backend is not None:
        sp.register_diffusers_backend(min_tokens=0)
        model.set_attention_backend(backend)
    with sp.apply(pipe, sp.SageAttnProcessor(**{"min_tokens": 0} | options)) as handle:
        alone = draw(STEPS)
        if not options:  # attention of each half alone: what a wrong exchange looks like
            with spread(model, parallel, attention=False):
                found["apart"] = sqnr_db(draw(STEPS), alone)
        handle.reset()
        with spread(model, parallel), counted_bytes() as sent:
            together, again = draw(STEPS), draw(STEPS)
            report = handle.report()
        site = next(iter(model.attn_processors.values()))._sage.sites[0]
        planned = [] if site.state is None else site.state.plan_scale[: site.kv_heads].nonzero().flatten().tolist()
    if backend is not None:
        sp.unregister_diffusers_backend()
        model.reset_attention_backend()
    first = report.rows[0]
    return found | {
        "to_alone": sqnr_db(together, alone), "alone_to_exact": sqnr_db(alone, exact),
        "to_exact": sqnr_db(together, exact), "repeats": torch.equal(together, again),
        "sum": float(together.double().sum()), "calls": first["calls"], "dynamic": first["dynamic_calls"],
        "planned": planned, "reported_bytes": sum(row["sent_bytes"] for row in report.rows), "sent_bytes": sum(sent),
        "fallbacks": report.fallbacks,
    }  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
