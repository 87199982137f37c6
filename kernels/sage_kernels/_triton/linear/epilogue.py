"""Epilogue of the 8-bit matmul in fp32: dequantisation, bias, activation, gate, residual."""

import triton
import triton.language as tl


_MINUS_LOG2_E = tl.constexpr(-1.4426950408889634)
_GELU_SCALE = tl.constexpr(-2 * 0.7978845608028654 * 1.4426950408889634)  # -2 · sqrt(2 / pi) · log2(e)
_GELU_CUBIC = tl.constexpr(0.044715)
_SQRT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def _logistic(y, exponent, ASM: tl.constexpr):
    """Return y / (1 + 2^exponent) in fp32, to about 2 ulp.

    ASM: in three instructions instead of the compiler's fifteen.
    """
    if ASM:
        y *= tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = y / (1.0 + tl.exp2(exponent))
    return y


@triton.jit
def activated(y, ACTIVATION: tl.constexpr, ASM: tl.constexpr):
    """Apply the activation function "none", "gelu", "gelu_tanh" or "silu"."""
    if ACTIVATION == "gelu":
        y = y * 0.5 * (1.0 + tl.erf(y * _SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        y = _logistic(y, y * (y * y * (_GELU_SCALE * _GELU_CUBIC) + _GELU_SCALE), ASM)
    elif ACTIVATION == "silu":
        y = _logistic(y, y * _MINUS_LOG2_E, ASM)
    return y


@triton.jit
def finish_tile(
    sums, m, first, x_scale, w_scale_ptr, bias_ptr, gate_ptr, rows, columns, columns_out, tokens, stride_gb, stride_gt,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, ASM: tl.constexpr, SCALE_STEP: tl.constexpr = 1,
):  # fmt: skip
    """Turn sums of products [BLOCK_M, BLOCK_N] into fp32 outputs, still without the residual.

    The result is [BLOCK_M, BLOCK_N], or half as wide if GATED.

    m, x_scale: the rows and their quantisation scales [BLOCK_M].
    first: the tile's first row of the weight, which is a column of the sums.
    GATED: column 2i is a value and 2i + 1 its gate, as in GEGLU and SwiGLU.
    GATE: multiply by gate_ptr: "none", "all" (one vector for all rows) or "row".
    SCALE_STEP: stride of the weight's scales.
    """
    n = first + tl.arange(0, BLOCK_N)
    w_scale = tl.load(w_scale_ptr + n * SCALE_STEP, mask=n < columns, other=0.0)
    y = sums.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if not GATED:
        y = activated(y, ACTIVATION, ASM)
        o = n
    else:
        value, gate = tl.split(tl.reshape(y, (BLOCK_M, BLOCK_N // 2, 2)))
        y = value * activated(gate, ACTIVATION, ASM)
        o = first // 2 + tl.arange(0, BLOCK_N // 2)
    if GATE == "all":
        y *= tl.load(gate_ptr + o, mask=o < columns_out, other=0.0).to(tl.float32)[None, :]
    if GATE == "row":
        base = (m // tokens).to(tl.int64) * stride_gb + (m % tokens).to(tl.int64) * stride_gt
        inside = (m < rows)[:, None] & (o < columns_out)[None, :]
        y *= tl.load(gate_ptr + base[:, None] + o[None, :], mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def finish_and_store(
    sums, m, j, x_scale_ptr, w_scale_ptr, bias_ptr, gate_ptr, residual_ptr, out_ptr, rows, columns, columns_out,
    tokens, stride_gb, stride_gt, stride_r, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ASM: tl.constexpr,
    HAS_X_SCALE: tl.constexpr = True, SCALE_STEP: tl.constexpr = 1,
):  # fmt: skip
    """Finish sums [len(m), BLOCK_N], add the residual, and store them. m: rows; j: column of tiles.

    HAS_X_SCALE: False for rows in 16 bit, which have no quantisation scale.
    """
    x_scale = tl.full([m.shape[0]], 1.0, tl.float32)
    if HAS_X_SCALE:
        x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)
    y = finish_tile(
        sums, m, j * BLOCK_N, x_scale, w_scale_ptr, bias_ptr, gate_ptr, rows, columns, columns_out, tokens, stride_gb,
        stride_gt, m.shape[0], BLOCK_N, ACTIVATION, GATED, HAS_BIAS, GATE, ASM, SCALE_STEP,
    )  # fmt: skip
    BLOCK_OUT: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    o = j * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inside = (m < rows)[:, None] & (o < columns_out)[None, :]
    if HAS_RESIDUAL:
        at = residual_ptr + m.to(tl.int64)[:, None] * stride_r + o[None, :]
        y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + m.to(tl.int64)[:, None] * columns_out + o[None, :]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=inside)
