"""Compile kernels ahead: those of one kind of attention calls, at any length and number of heads.

Compiling takes seconds a kernel. `compile_ahead` starts it in the background, for calls that are to come; a call that
is made before its kernels are ready waits for them. Compiled kernels stay in Triton's cache.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..facts.few_rows import WEIGHT_ONLY
from ..facts.masking import Masking, make_masking
from ..facts.numerics import CODE_TYPES
from ..facts.recipe import DEFAULT_RECIPE, GATED, RECIPES
from ..facts.state import new_head_state
from .skip_state import new_skip_state


# Calls of up to 8,191 keys and longer ones have different kernels (query_slice, _triton/attention/tiles.py).
SHORT, LONG = 4096, 8192


class CallKind(NamedTuple):
    """All that decides the kernels of an attention call, apart from its length.

    Attributes:
        dtype: of q, k and v.
        head_dim: D of q, k and v.
        recipe, scaling, rotation: as of `sage_attention`; scaling "planned": with a state.
        keeps_rows: with "planned" and 8-bit P: later calls keep row maxima, and then begin from kept ones.
        skips: later calls have lists of key tiles; only with "planned" and without masks.
        compensates: of these lists.
        causal: "", "top_left" or "bottom_right".
        by_key: dtype of a mask of keys; None: without one.
        tokens: numbers of queries and keys, one of each length that has kernels of its own.
    """

    dtype: torch.dtype
    head_dim: int
    recipe: str = DEFAULT_RECIPE
    scaling: str = "planned"
    rotation: str = "none"
    keeps_rows: bool = False
    skips: bool = False
    compensates: bool = False
    causal: str = ""
    by_key: torch.dtype | None = None
    tokens: tuple[int, ...] = (LONG, SHORT)


class HeadsKind(NamedTuple):
    """All that decides the kernel of `qk_norm_rope`.

    Attributes:
        dtype, head_dim: as of CallKind.
        norm: whether there is an RMSNorm.
        weight_dtype: of the norms' weights; None: without.
        complex_angles: the angles are complex numbers [S, D / 2], not cos and sin [S, D]; both are fp32.
        pairs, across_heads: as of `qk_norm_rope`.
        rotates: False for a part of the sequence that has no angles.
    """

    dtype: torch.dtype
    head_dim: int
    norm: bool
    weight_dtype: torch.dtype | None
    complex_angles: bool
    pairs: bool
    across_heads: bool
    rotates: bool = True


def loaded_kernels() -> list[Any]:
    """Return the kernels that Triton compiled or loaded in this process, in order.

    Each is a LoadedKernel of `_triton/compat.py`. Empty before the first op on a GPU, and if Triton does not tell, or
    tells somebody else.
    """
    compat = sys.modules.get(f"{__package__.rpartition('.')[0]}._triton.compat")
    return [] if compat is None else list(compat.loaded)


def heads_call(kind: HeadsKind, device: torch.device) -> Callable:
    """Return a function that launches `qk_norm_rope` for this kind, for `compile_ahead`."""

    def call():
        from .._triton.heads.qk_norm_rope import launch_qk_norm_rope

        width = kind.head_dim
        q = torch.empty(1, LONG, 1, width, dtype=kind.dtype, device=device)
        weight = None if kind.weight_dtype is None else torch.empty(width, dtype=kind.weight_dtype, device=device)
        if kind.complex_angles:
            cos, sin = torch.empty(LONG, width // 2, 2, dtype=torch.float32, device=device).unbind(-1)
        else:
            cos, sin = torch.empty(2, LONG, width, dtype=torch.float32, device=device)
        weights = [weight], [weight]
        tables = ([cos], [sin]) if kind.rotates else ([], [])
        launch_qk_norm_rope([q], [q], *weights, kind.norm, 1e-6, *tables, kind.pairs, kind.across_heads)

    return call


def get_ready() -> None:
    """Begin, in the background, what the first launch of a kernel in a process would wait for."""
    from .._triton.compat import get_ready as begin

    begin()


def weight_calls(dtype: torch.dtype, format: str, depth: int, device: torch.device) -> list[Callable]:
    """Return functions that quantise a weight [N, depth], without and with a balance, for `compile_ahead`."""

    def call(balance: bool):
        from .._triton.linear.quantize_weight import launch_quantize_weight

        weight = torch.empty(16, depth, dtype=dtype, device=device)
        factors = torch.empty(depth, dtype=torch.float32, device=device)
        launch_quantize_weight(weight, format, factors if balance else None)

    return [functools.partial(call, balance) for balance in (False, True)]


class LinearKind(NamedTuple):
    """All that decides the kernels of an 8-bit linear layer, apart from its number of rows.

    Attributes:
        dtype: of its input and output.
        format: "int8", "fp8", or WEIGHT_ONLY: an INT8 weight is multiplied by few rows in 16 bit.
        depth, columns: numbers of its input and output features.
        bias: True if there is one.
        norm: of its input, in the launch that quantises it: "none", "rms" or "layer", the last one modulated.
        activation: as of `quantized_linear`.
        adds: the result is multiplied by a gate and added to a residual.
        beside: so many of its input features are those of a second tensor, which lies beside the first.
    """

    dtype: torch.dtype
    format: str
    depth: int
    columns: int
    bias: bool
    norm: str = "none"
    activation: str = "none"
    adds: bool = False
    beside: int = 0


def linear_calls(kind: LinearKind, device: torch.device, rows: Iterable[int] = (4608, 4096, 512)) -> list[Callable]:
    """Return functions that launch a layer of this kind with these numbers of rows, for `compile_ahead`.

    With some of these the last tiles are shared by programs, which takes a kernel more. WEIGHT_ONLY has one row.
    """

    def call(number: int):
        from .._triton.linear.launch import launch_quantize_activation, launch_quantized_linear

        def empty(*shape, dtype=kind.dtype):
            return torch.empty(shape, dtype=dtype, device=device)

        width = kind.columns // 2 if kind.activation in GATED else kind.columns
        gain, shift = (empty(1, 1, kind.depth) if kind.norm == "layer" else None for _ in range(2))
        codes, scale = launch_quantize_activation(
            empty(1, number, kind.depth - kind.beside), format=kind.format, norm=kind.norm, bias=None, eps=1e-6,
            gain=gain, weight=empty(kind.depth) if kind.norm == "rms" else None, shift=shift, balance=None,
            beside=empty(1, number, kind.beside) if kind.beside else None,
        )  # fmt: skip
        launch_quantized_linear(
            codes, scale, empty(kind.columns, kind.depth, dtype=CODE_TYPES[kind.format]),
            empty(kind.columns, dtype=torch.float32), empty(kind.columns) if kind.bias else None,
            activation=kind.activation, gate=empty(1, 1, width) if kind.adds else None,
            residual=empty(1, number, width) if kind.adds else None, dtype=kind.dtype,
        )  # fmt: skip

    def call_with_one_row():
        from .._triton.linear.launch import launch_weight_only_linear

        weight = torch.empty(kind.columns, kind.depth, dtype=torch.int8, device=device)
        scale = torch.empty(kind.columns, dtype=torch.float32, device=device)
        x, bias = (torch.empty(1, size, dtype=kind.dtype, device=device) for size in (kind.depth, kind.columns))
        launch_weight_only_linear(x, weight, scale, bias[0] if kind.bias else None)

    return [call_with_one_row] if kind.format == WEIGHT_ONLY else [functools.partial(call, number) for number in rows]


def compile_ahead(kinds: Iterable[CallKind], device: torch.device, others: Iterable[Callable] = ()):
    """Start to compile, in the background, the kernels of attention calls of these kinds on a GPU.

    Args:
        kinds: the calls in the order in which they will come.
        others: functions of no arguments that launch something else, as `heads_call` and
            `planning.state.closing_call` return.
    Returns: a Compiling; its `wait` ends when all are there.
    Raises: all that such a call would raise on this device, or when its tensors run out of memory.
    """
    from .._triton import launch

    first, later = [], []
    for kind in kinds:
        calls = list(_calls(kind, device))
        first += calls[: len(kind.tokens)]
        later += calls[len(kind.tokens) :]
    with torch.no_grad():
        return launch.compile_ahead([*first, *later, *others])


def _calls(kind: CallKind, device: torch.device) -> Iterator[Callable]:
    """Yield functions that launch attention of one head, each of the kind's lengths.

    After the plain launches come those with known row maxima, whose kernel compiles longest, then those that keep the
    first row maxima; then all of them again with lists of key tiles.
    """
    from .._triton.attention.launch import launch_attention_fwd

    keeps = kind.keeps_rows and kind.scaling == "planned" and RECIPES[kind.recipe].keeps_rows
    smooth_k = not RECIPES[kind.recipe].plain
    skips = kind.skips and kind.scaling == "planned" and not kind.causal and kind.by_key is None
    knowns = (None, True, False)[: 3 if keeps else 1]
    for skipping, known in [(skipping, known) for skipping in (False, True)[: 1 + skips] for known in knowns]:
        for tokens in kind.tokens:

            def call(tokens=tokens, known=known, skipping=skipping):
                q = torch.empty(1, tokens, 1, kind.head_dim, dtype=kind.dtype, device=device)
                state = new_head_state(1, kind.head_dim, device) if kind.scaling == "planned" else None
                if state is not None and known is not None:
                    state = state.keeping(torch.empty(1, 1, tokens, dtype=torch.float32, device=device), known)
                lists = None
                if skipping:
                    shape = (1, 1, tokens, tokens, kind.head_dim, device)
                    lists = new_skip_state(*shape, recipe=kind.recipe, compensates=kind.compensates)
                launch_attention_fwd(
                    q, q, q, scale=1.0, scaling=kind.scaling, smooth_k=smooth_k, state=state, return_lse=False,
                    recipe=kind.recipe, rotation=kind.rotation, masking=_masking(kind, tokens, device),
                    skip=lists,
                )  # fmt: skip

            yield call


def _masking(kind: CallKind, tokens: int, device: torch.device) -> Masking:
    mask = None
    if kind.by_key is not None:
        mask = torch.zeros(1, 1, 1, tokens, dtype=kind.by_key, device=device)
    return make_masking(mask, kind.causal, None, 0.0, None, tokens, tokens)[0]
