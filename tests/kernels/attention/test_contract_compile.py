"""opcheck, torch.compile, export and AOTInductor (cases T03 and T04 of the contract)."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch._dynamo.testing

from sage_kernels import DEFAULT_RECIPE, HeadState, new_head_state, sage_attention
from tests.kernels.attention.attention_cases import FP8, key_padding, normal, runs_fp8


OPTIONS = {
    "plain": (None, None, 0.25, "per_token", True, "", None, 0.0, "none"),
    "rotated": (None, None, 0.25, "per_token", True, "", None, 0.0, "hadamard"),
    "per_block": (None, None, 0.25, "per_block", False, "", None, 0.0, "none"),
    "key mask": (key_padding([24, 9], 24), None, 0.25, "per_token", True, "", None, 0.0, "none"),
    "bias and softcap": (torch.randn(24, 24), None, 0.25, "per_token", True, "", None, 5.0, "none"),
    "causal, window, sinks": (None, torch.zeros(2), 0.25, "per_token", True, "bottom_right", 4, 0.0, "none"),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op", ["attention", "attention_lse", "attention_planned", "attention_planned_lse"])
# the options do not depend on the recipe
@pytest.mark.parametrize(("recipe", "options"), [*((DEFAULT_RECIPE, name) for name in OPTIONS), (FP8, "plain")])
def test_T03_opcheck(recipe, options, op, device):
    if recipe == FP8 and not runs_fp8(device):
        pytest.skip("this GPU has no FP8")
    dtype = torch.float16 if device == "cuda" else torch.float32
    plain = [x.to(device) for x in normal(2, 24, 24, 2, 2, 16, dtype=dtype)]
    bhsd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    given = [x.to(device) if isinstance(x, torch.Tensor) else x for x in OPTIONS[options]]
    layouts = (plain, bhsd, torch.cat(plain, 3).chunk(3, 3))
    for inputs in layouts if options == "plain" else layouts[-1:]:
        state = tuple(new_head_state(2, 16, device)) if "planned" in op else ()
        if state and recipe == FP8:
            state = (*state[:-1], torch.zeros(2, 2, 24, device=device))  # the row maxima
        arguments = (*inputs, *given[:-1], recipe, given[-1], *state)
        torch.library.opcheck(getattr(torch.ops.sage_kernels, op).default, arguments)


COMPILED = {
    "plain": lambda seq: {},
    "rotated": lambda seq: {"rotation": "hadamard"},
    "causal": lambda seq: {"causal": True},
    "window and sinks": lambda seq: {"causal": "bottom_right", "window": 8, "sinks": torch.zeros(2)},
    "key mask": lambda seq: {"attn_mask": key_padding([seq, seq - 3], seq)},
    "bias": lambda seq: {"attn_mask": torch.randn(seq, seq, generator=torch.Generator().manual_seed(seq))},
}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("case", COMPILED)
def test_T04_new_lengths_recompile_once(case, planned):
    """The first length that differs makes the graph dynamic; after that no length compiles again."""
    torch._dynamo.reset()
    state = new_head_state(2, 32, "cpu") if planned else None

    def attention(q, k, v, options):
        return sage_attention(q, k, v, state=state, return_lse=True, **options)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for i, seq in enumerate((40, 56, 33, 72, 90)):
        inputs = (*normal(2, seq, seq, 2, 2, 32, seed=seq), COMPILED[case](seq))
        kept = HeadState(*(x.clone() for x in state)) if planned else None
        out, lse = compiled(*inputs)
        expected, expected_lse = sage_attention(*inputs[:3], state=kept, return_lse=True, **inputs[3])
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        if planned:
            assert all(torch.equal(a, b) for a, b in zip(kept, state, strict=True))
        assert counter.frame_count <= min(i + 1, 2), seq
    torch._dynamo.reset()


class Exported(torch.nn.Module):
    """Packed projections, a key mask and a causal second call: what a block of a model does."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.register_buffer("sinks", torch.zeros(2))

    def forward(self, x, mask):
        q, k, v = self.project(x).unflatten(-1, (2, 48)).chunk(3, -1)
        seen = sage_attention(q, k, v, attn_mask=mask)
        return sage_attention(seen, k, v, causal=True, window=5, sinks=self.sinks, softcap=30.0).flatten(2)


def exported(seq):
    generator = torch.Generator().manual_seed(seq)
    return torch.randn(2, seq, 32, generator=generator), key_padding([seq, seq - 4], seq)


@pytest.mark.slow("compiles C++")
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor on the CPU needs g++")
def test_T04_export_and_aot_inductor_with_dynamic_lengths(tmp_path):
    """The op is a call in the exported graph; the package holds no kernel of ours, so `import sage_kernels` must come
    before it is run."""
    torch.manual_seed(0)
    module = Exported().eval()
    with torch.no_grad():
        seq = torch.export.Dim("seq", min=2, max=500)
        program = torch.export.export(module, exported(20), dynamic_shapes=({1: seq}, {3: seq}))
        assert torch.equal(program.module()(*exported(50)), module(*exported(50)))
        quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
        place = str(tmp_path / "module.pt2")
        package = torch._inductor.aoti_compile_and_package(program, package_path=place, inductor_configs=quick)
        run = torch._inductor.aoti_load_package(package)
        for length in (20, 33, 50):
            torch.testing.assert_close(run(*exported(length)), module(*exported(length)), rtol=1e-5, atol=1e-5)
