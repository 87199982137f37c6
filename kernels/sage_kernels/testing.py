"""Inputs and error tolerances of tests and benchmarks. Tolerances are derived here and nowhere else."""

from __future__ import annotations

import ctypes
from collections import Counter

import torch

from .facts.masking import NO_MASKING, Masking, make_masking
from .facts.numerics import pv_dtype
from .facts.recipe import DEFAULT_RECIPE, RECIPES
from .reference import ref_attention


# Kinds of inputs that real models have, from harmless to hard.
FAMILIES = (
    "normal",
    "biased_keys",
    "outlier_channels",
    "outlier_tokens",
    "varying_outliers",
    "biased_varying_outliers",
)

BLOCK_FAMILIES = ("iid", "clustered", "heavy_tailed", "clustered_biased", "needle")
# Tokens of a cluster: 1.5 blocks, so that clusters and blocks do not share their borders.
_CLUSTER = 96


def make_qkv(family, batch, seq_q, seq_kv, heads, kv_heads, head_dim, *, dtype=torch.float32, device="cpu", seed=0):
    """Draw random q [B, S_q, H, D], k, v [B, S_kv, H_kv, D] of one of FAMILIES.

    "normal": N(0, 1). "biased_keys": one vector is added to all keys of a head. "outlier_channels": two channels of q
    are multiplied by 64 and divided in k (the scores stay the same). "outlier_tokens": one key in 50 is twenty times
    larger in one channel. "varying_outliers": two channels of k are twenty times larger, and differ from token to
    token, so that no centre removes them. "biased_varying_outliers": four channels of k are eight times larger; k also
    has biases of N(0, 2²), and of ±20 in four other channels, and q has biases of N(0, 1).
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    # of biases, which belong to the model and not to the draw: the same for every seed
    fixed = torch.Generator("cpu").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    q = normal(batch, seq_q, heads, head_dim)
    k = normal(batch, seq_kv, kv_heads, head_dim)
    v = normal(batch, seq_kv, kv_heads, head_dim)
    if family == "biased_keys":
        k += 3 * torch.randn(1, 1, kv_heads, head_dim, generator=fixed, dtype=torch.float32, device="cpu")
    elif family == "outlier_channels":
        q[..., :2] *= 64
        k[..., :2] /= 64
    elif family == "outlier_tokens":
        k[:, ::50, :, 1] *= 20
    elif family == "varying_outliers":
        k[..., [head_dim // 3, head_dim // 2]] *= 20
    elif family == "biased_varying_outliers":
        k[..., : head_dim // 2 : head_dim // 8] *= 8
        bias = 2 * torch.randn(1, 1, kv_heads, head_dim, generator=fixed, dtype=torch.float32, device="cpu")
        bias[..., head_dim // 2 :: head_dim // 8] = 20 * bias[..., head_dim // 2 :: head_dim // 8].sign()
        k += bias
        q += torch.randn(1, 1, heads, head_dim, generator=fixed, dtype=torch.float32, device="cpu")
    elif family != "normal":
        raise ValueError(f"family: got {family!r}, expected one of {FAMILIES}")
    return tuple(x.to(device, dtype) for x in (q, k, v))


def make_blocks(
    family: str, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, *, dtype=torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw random q [B, S, H, D], k, v [B, S, H_kv, D] of one of BLOCK_FAMILIES, for mixed attention.

    "iid": N(0, 1). "clustered": runs of 96 keys share a direction, and each run of 96 queries points in the direction
    of one of them. "heavy_tailed": "clustered" with a lognormal strength for each run of queries. "clustered_biased":
    "clustered" with one vector added to all keys of a head. "needle": each query points at one key, anywhere.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    q, k = normal(batch, seq, heads, head_dim), normal(batch, seq, kv_heads, head_dim)
    v = normal(batch, seq, kv_heads, head_dim)
    group, runs = heads // kv_heads, -(-seq // _CLUSTER)
    of_token = torch.arange(seq, device="cpu") // _CLUSTER
    if family in ("clustered", "heavy_tailed", "clustered_biased"):
        directions = normal(batch, runs, kv_heads, head_dim)
        wanted = torch.randint(runs, (runs,), generator=generator, device="cpu")
        strength = torch.full((runs,), 0.7, dtype=torch.float32, device="cpu")
        if family == "heavy_tailed":
            strength = 1.1 * torch.exp(0.5 * normal(runs))
        k = k + 0.6 * directions[:, of_token]
        looked_for = strength[:, None, None] * directions[:, wanted]
        q = q + looked_for.repeat_interleave(group, 2)[:, of_token]
        if family == "clustered_biased":
            fixed = torch.Generator().manual_seed(0)
            k = k + 3 * torch.randn(1, 1, kv_heads, head_dim, generator=fixed, dtype=torch.float32, device="cpu")
    elif family == "needle":
        needles = torch.randint(seq, (seq,), generator=generator, device="cpu")
        q = 0.7 * q + 0.8 * k[:, needles].repeat_interleave(group, 2)
    elif family != "iid":
        raise ValueError(f"family: got {family!r}, expected one of {BLOCK_FAMILIES}")
    return q.to(dtype), k.to(dtype), v.to(dtype)


def make_biased(seq_kv: int, *, seq_q: int = 256, heads: int = 2, head_dim: int = 128, seed: int = 0):
    """Draw random q [1, S_q, H, D], k, v [1, S_kv, H, D], fp32, with a bias in every channel.

    Four channels of K have biases of ±20 in all tokens alike, which only a centre can remove.
    """
    fixed = torch.Generator().manual_seed(7)
    q, k, v = make_qkv("normal", 1, seq_q, seq_kv, heads, heads, head_dim, seed=seed)
    bias = 2 * torch.randn(1, 1, heads, head_dim, generator=fixed, dtype=torch.float32, device="cpu")
    bias[..., :: head_dim // 4] = 20 * bias[..., :: head_dim // 4].sign()
    q = q + 0.5 * torch.randn(1, 1, heads, head_dim, generator=fixed, dtype=torch.float32, device="cpu")
    return q, k + bias, v + 2 * torch.randn(1, 1, heads, head_dim, generator=fixed, dtype=torch.float32, device="cpu")


def exact_attention(q, k, v, scale=None, *, mask=None, softcap=0.0, sinks=None):
    """Attention in fp64: out [B, S_q, H, D], and its LSE [B, S_q, H] (natural log).

    mask: as in scaled_dot_product_attention; a row that sees nothing gives 0. sinks: [H].
    """
    repeat = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:  # one more key, with a value of zeros
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    lse = scores.logsumexp(-1)
    p = torch.where((lse == -torch.inf)[..., None], 0.0, scores.softmax(-1))
    return (p @ v).transpose(1, 2), lse.transpose(1, 2)


def masked_keys(k, v, seq_q, *, attn_mask=None, causal=False, window=None, softcap=0.0, sinks=None):
    """Return the keys, values and Masking that `sage_attention` passes to its kernels for these options."""
    masking, keys = make_masking(attn_mask, causal, window, softcap, sinks, seq_q, k.shape[1])
    return k[:, keys], v[:, keys], masking


def relative_l1(out, reference, dim=None) -> torch.Tensor:
    """Σ|out - reference| / Σ|reference|, over everything or over `dim`; on the reference's device."""
    reference = reference.double()
    error, size = (out.to(reference) - reference).abs(), reference.abs()
    return error.sum() / size.sum() if dim is None else _ratio(error.sum(dim), size.sum(dim))


def relative_l2(out, reference, dim=None) -> torch.Tensor:
    """‖out - reference‖ / ‖reference‖, over everything or over `dim`; on the reference's device."""
    reference = reference.double()
    dim = tuple(range(reference.dim())) if dim is None else dim
    return _ratio((out.to(reference) - reference).square().sum(dim).sqrt(), reference.square().sum(dim).sqrt())


def _ratio(error, size):
    """error / size. 0 / 0 is 0, as in a row that sees nothing; any error there is infinite."""
    return torch.where((error == 0) & (size == 0), 0.0, error / size)


def sqnr_db(out, reference) -> float:
    """Signal to quantisation-noise ratio, 10·log10(Σr² / Σ(o - r)²), in dB."""
    return float(-20 * relative_l2(out, reference).log10())


GRAPH_NODES = ("kernel", "copy", "fill", "host", "graph", "empty")  # CUgraphNodeType, from 0 on


def graph_nodes(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """Count the nodes of a captured CUDAGraph(keep_graph=True): {kind of node: number}.

    Raises: RuntimeError if the driver refuses.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    handle, number, kind = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(), ctypes.c_int()

    def ask(function, *arguments):
        code = function(*arguments)
        if code:
            raise RuntimeError(f"{function.__name__}: got CUDA error {code}, expected 0")

    ask(driver.cuGraphGetNodes, handle, None, ctypes.byref(number))
    nodes = (ctypes.c_void_p * number.value)()
    ask(driver.cuGraphGetNodes, handle, nodes, ctypes.byref(number))
    found: Counter[str] = Counter()
    for node in nodes:
        ask(driver.cuGraphNodeGetType, ctypes.c_void_p(node), ctypes.byref(kind))
        found[GRAPH_NODES[kind.value] if kind.value < len(GRAPH_NODES) else f"kind {kind.value}"] += 1
    return found


FP32_ROUNDING = 2.0**-24


def assert_matches_reference(
    out, lse, q, k, v, *, state=None, masking: Masking = NO_MASKING, device="cpu", exponent=64.0, first_max=False,
    **options,
) -> None:  # fmt: skip
    """Compare a kernel with the same-quantisation reference, per (batch, head) and in the worst row.

    FlashAttention's rule: against the reference without rounding of P and of the output, a kernel may be twice as far
    off as the reference with both. That distance is the floor: the cost of rounding alone. Codes that flip because a
    sum ran in another order are rare enough to stay inside.

    Args:
        masking: as the kernel got it beside q, k and v (see `masked_keys`).
        device: where the reference runs. On a GPU its codes are the same (each is one product and one division, each
            rounded once), and its scales differ by an fp32 rounding, far below the floor.
        exponent: size of the scores (base 2) from which the difference to the largest of their row is formed. Their
            fp32 rounding is an error even of an unrounded P. More than 64 with a large bias or scale.
        first_max: the kernel keeps the first key tile's max as the softmax reference, so here, too.
        options: of ref_attention.
    """
    q, k, v, out = (x.detach().to(device) for x in (q, k, v, out))
    options |= {"return_lse": lse is not None}
    on_device: list = [x.to(device) if isinstance(x, torch.Tensor) else x for x in masking]
    masking = Masking(*on_device)

    def reference(inputs, **extra):
        copied = None if state is None else type(state)(*(x.to(device, copy=True) for x in state))
        return ref_attention(inputs[0], inputs[1], inputs[2], state=copied, masking=masking, **options, **extra)

    # V is rounded in both: it is an input, so rounding it is no error of the kernel
    exact_inputs = [x.float() for x in (q, k, v.to(pv_dtype(v.dtype)))]
    unrounded, ref_lse = reference(exact_inputs, round_p=False, rotated_dtype=q.dtype)
    rounded, rounded_lse = reference([q, k, v], first_max=first_max)
    for name, dim in (("head", (1, 3)), ("row", 3)):
        floor = relative_l2(rounded, unrounded, dim).max()
        error = relative_l2(out, unrounded, dim).max()
        if not error <= 2 * floor + exponent * FP32_ROUNDING:
            raise AssertionError(f"worst {name}: relative L2 {error:.2e} from the reference, floor {floor:.2e}")
    if lse is not None:
        lse = lse.to(device)
        floor, worst = (torch.where(x == ref_lse, 0.0, (x - ref_lse).abs()).max() for x in (rounded_lse, lse))  # -inf
        # a sum of the rounded P is off by its rounding
        own = RECIPES[options.get("recipe", DEFAULT_RECIPE)]
        sums_codes = own.sums_codes or (first_max and own.pv == "int8")
        if not worst <= 2e-3 + 2 * exponent * FP32_ROUNDING + (2 * floor if sums_codes else 0.0):
            raise AssertionError(f"lse: worst error {worst:.2e}")
