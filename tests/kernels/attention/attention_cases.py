"""What the contract tests share: the op on each of its implementations, and the masks that its options stand for."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
import sage_kernels.reference
from sage_kernels import HeadState, sage_attention
from sage_kernels.facts.masking import NO_MASKING, make_masking
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import assert_matches_reference, exact_attention, make_qkv, masked_keys


# the interpreter's bf16 dot is broken, and fp32 inputs run P·V in bf16
DTYPES = {
    "reference": (torch.float16, torch.bfloat16, torch.float32),
    "interpreter": (torch.float16,),
    "cuda": (torch.float16, torch.bfloat16, torch.float32),
}
# for what has no fp16 form
without_interpreter = pytest.mark.parametrize(
    "tier", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
FP8 = "qk_int8_pv_fp8"
MASKING = ("attn_mask", "causal", "window", "softcap", "sinks")


class Attend:
    """`sage_attention`, all of it, on one implementation of its kernels. Tensors go to its device, results come back.

    tier: "reference", "interpreter" (the Triton kernels on CPU tensors, where the op itself would run the reference)
        or "cuda". `patch` is pytest's monkeypatch.
    """

    def __init__(self, tier: str, patch):
        self.tier = tier
        self.device = torch.device("cuda" if tier == "cuda" else "cpu")
        self.dtypes = DTYPES[tier]
        # of the latest call, for the kernels choose their own tiles: blocks of the scales, reference of the softmax
        self.blocks, self.first_max = {}, False
        self.reference_device = torch.device("cpu")
        if tier == "reference":
            return
        from sage_kernels._triton.attention import launch as launch_attention

        choose = launch_attention.device_tile

        def recorded(*args, **kwargs):
            tile = choose(*args, **kwargs)
            self.blocks = {"block_q": tile.scale_rows, "block_k": tile.block_n}
            self.first_max = tile.keep_first_max
            return tile

        patch.setattr(launch_attention, "device_tile", recorded)
        # a call that is made again has its tile from the first one, perhaps of a test that chose another
        patch.setattr(sage_kernels.ops.attention, "_try_replay", lambda *_, **__: (None, None))
        if tier == "interpreter":
            patch.setattr(sage_kernels.reference, "ref_attention", launch_attention.launch_attention_fwd)

    def __call__(self, q, k, v, *, return_lse=True, **options):
        """out, lse on the CPU; the state is updated where it is."""
        q, k, v = (x.to(self.device) for x in (q, k, v))
        options = {n: x.to(self.device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        result = sage_attention(q, k, v, return_lse=return_lse, **options)
        out, lse = result if return_lse else (result, None)
        assert out.dtype == q.dtype and out.is_contiguous() and out.shape == q.shape
        return out.cpu(), None if lse is None else lse.cpu()

    def check(self, q, k, v, *, state=None, exponent=64.0, **options):
        """As a call, held against the same-quantisation reference by `assert_matches_reference`."""
        before = None if state is None else HeadState(*(x.cpu().clone() for x in state))
        out, lse = self(q, k, v, state=state, **options)
        masking = {n: options.pop(n) for n in MASKING if n in options}
        seen_k, seen_v, masking = masked_keys(k, v, q.shape[1], **masking)
        if self.tier != "reference":
            options |= self.blocks
        if seen_k.shape[1]:
            assert_matches_reference(
                out, lse, q, seen_k, seen_v, state=before, masking=masking, exponent=exponent,
                first_max=self.first_max, device=self.reference_device, **options,
            )  # fmt: skip
        return out, lse

    def planned(self, q, k, v, **options) -> HeadState:
        """A state whose plan comes from one step on these inputs."""
        state = ScaleState([Site("a", k.shape[2], q.shape[3])], device=self.device)
        self(q, k, v, state=state.head_state(0), **options)
        state.advance(1.0, 0.9)
        return state.head_state(0)

    def scaled(self, scaling: str, q, k, v, **masking) -> dict:
        """Options of a scaling; "planned": with a state whose plan comes from these inputs under this masking."""
        return {"state": self.planned(q, k, v, **masking)} if scaling == "planned" else {"scaling": scaling}


def runs_fp8(tier: str) -> bool:
    """Whether the recipe with P and V in FP8 runs on a tier."""
    return tier != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9))


def running(attend, recipe: str):
    """`attend`, whose checks and plans run this recipe; skipped on a GPU that has no FP8 where it needs that.

    For recipes with 8-bit P: those of fp32 inputs are right in the interpreter, too, as no bf16 is involved.
    """
    own = sage_kernels.RECIPES[recipe]
    if "fp8_e4m3" in (own.qk, own.pv) and not runs_fp8(attend.tier):
        pytest.skip("needs a GPU of compute capability 8.9 or newer")
    attend.dtypes = (*DTYPES[attend.tier], *([torch.float32] if attend.tier == "interpreter" else []))

    def run(method):
        return lambda *inputs, **options: method(*inputs, recipe=recipe, **options)

    for name in ("check", "planned"):
        setattr(attend, name, run(getattr(attend, name)))
    return attend


def normal(batch, seq_q, seq_kv, heads, kv_heads, head_dim, dtype=torch.float16, seed=0):
    """q, k, v of N(0, 1)."""
    return make_qkv("normal", batch, seq_q, seq_kv, heads, kv_heads, head_dim, dtype=dtype, seed=seed)


LAYOUTS = ("contiguous", "BHSD", "last_stride", "sliced", "every_other_channel", "every_other_token", "offset")


def in_layout(x, layout: str) -> torch.Tensor:
    """The values of x [B, S, H, D], laid out otherwise; what lies between them is NaN."""
    if layout == "BHSD":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "last_stride":
        outer = 2 if x.shape[2] > 1 else 1
        return x.transpose(outer, 3).contiguous().transpose(outer, 3)
    if layout == "sliced":  # rows start at odd multiples of an element
        return torch.nn.functional.pad(x, (2, 3, 1, 0), value=torch.nan)[..., 1:, 2 : 2 + x.shape[3]]
    if layout == "every_other_channel":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    if layout == "every_other_token":
        return torch.stack([torch.full_like(x, torch.nan), x], 2).flatten(1, 2)[:, 1::2]
    if layout == "offset":  # no 16-byte alignment: neither the copy engine nor wide loads apply
        return torch.cat([x.new_full((1,), torch.nan), x.flatten()])[1:].view(x.shape)
    return x


def stored_values(device, shape, hidden: bool, pv: str, offset: float, **options):
    """V [B, S, H, D] with a loud channel, a NaN and an inf, and what the prologue makes of it in 8 bit.

    Returns: v, the keys that are seen bool [B, 1, S] or None, the codes as [B, H, width, S padded], and value_scale.
    """
    from sage_kernels._triton.primitives import head_width
    from sage_kernels._triton.prologue.mask_tiles import launch_mask_tiles
    from sage_kernels._triton.prologue.prologue import launch_prologue

    batch, seq, heads, head_dim = shape
    v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half() + offset
    v[..., 3] *= 1000
    v[0, 5, 0, 1], v[0, 6, 0, 2] = torch.nan, torch.inf
    seen, masking = None, NO_MASKING
    if hidden:
        seen = key_padding([seq - 9] * batch, seq)
        v[:, -9:], v[:, -4] = 6e4, torch.nan
        masking, _ = make_masking(seen.to(device), False, None, 0.0, None, 70, seq)
        seen = seen[:, :, 0]
    width = head_width(head_dim)
    mask = launch_mask_tiles(masking, heads, heads, 70, seq, 64, 64)
    q, on_device = torch.zeros(batch, 70, heads, head_dim, dtype=v.dtype, device=device), v.to(device)
    prepared = launch_prologue(
        q, torch.zeros_like(on_device), on_device, mask=mask, return_center=False, block_n=64, width=width,
        rotation="none", pv=pv, **options,
    )  # fmt: skip
    steps = -(-seq // prepared.values.shape[1])
    codes = prepared.values.cpu().view(torch.int8).view(batch, heads, steps, width, 8, 4, 2, 2).transpose(-2, -3)
    codes = codes.reshape(batch, heads, steps, width, 128).transpose(2, 3).flatten(3)  # back in order
    return v, seen, codes.view(prepared.values.dtype), prepared.value_scale.cpu()


def band_mask(seq_q: int, seq_kv: int, causal: str | bool = False, window: int | None = None) -> torch.Tensor:
    """The bool mask [S_q, S_kv] that causal and window stand for, by PyTorch's own triangles."""
    diagonal = seq_kv - seq_q if causal == "bottom_right" else 0
    seen = torch.ones(seq_q, seq_kv, dtype=torch.bool)
    if causal:
        seen = seen.tril(diagonal)
    if window is not None:
        seen = seen.triu(diagonal - window + 1)
        if not causal:
            seen = seen.tril(diagonal + window - 1)
    return seen


def exact_under(masking: dict, q, k, v) -> torch.Tensor:
    """Exact attention [B, S_q, H, D] under one of MASKS."""
    mask = masking.get("attn_mask")
    if "causal" in masking:
        mask = band_mask(q.shape[1], k.shape[1], masking["causal"], masking.get("window"))
    return exact_attention(q, k, v, mask=mask, softcap=masking.get("softcap", 0.0), sinks=masking.get("sinks"))[0]


def key_padding(lengths, seq_kv: int) -> torch.Tensor:
    """Bool mask [B, 1, 1, S_kv]: sample b sees its first lengths[b] keys."""
    return (torch.arange(seq_kv) < torch.tensor(lengths)[:, None])[:, None, None]


SHAPES = [  # B, S_q, S_kv, H, H_kv, D
    (1, 1, 1, 2, 2, 64),
    (2, 70, 200, 2, 1, 64),
    (1, 70, 200, 3, 1, 128),
    (1, 33, 66, 2, 2, 59),
    (1, 40, 70, 1, 1, 256),
]
# of calls with 70 rows and 150 keys, two samples
MASKS = {
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"causal": "bottom_right", "window": 40},
    "key padding": {"attn_mask": key_padding([150, 97], 150)},
    "rows": {"attn_mask": band_mask(70, 150, "bottom_right", 60)},
    "bias": {"attn_mask": torch.randn(70, 150, generator=torch.Generator().manual_seed(0))},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([1.0, 9.0])},
}
