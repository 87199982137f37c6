"""Cost of attention calls relative to each other, counted from shapes or measured on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import sage_kernels
from sage_kernels.facts.crossover import NEVER, find_crossover, gpu_class
from sage_kernels.planning.rules import RULES

from ..option_groups import SCALINGS


# One H100 SXM by its data sheet, dense. Only ratios matter: INT8 twice as fast as 16 bit, 295 16-bit operations/byte.
FLOPS_16BIT, OPS_INT8, BYTES_PER_SECOND = 989e12, 1979e12, 3.35e12
EXACT = "exact"


@dataclass(frozen=True)
class CallShape:
    """Shapes of one attention call. seq_q, seq_kv: queries and keys per sample."""

    batch: int
    seq_q: int
    seq_kv: int
    heads: int
    kv_heads: int
    head_dim: int


def counted_seconds(
    shape: CallShape, scaling: str, recipe: str = sage_kernels.DEFAULT_RECIPE, rotation: str = "none"
) -> float:
    """Return the seconds of a call by its operations and bytes, at the rates of a data sheet.

    Exponentials and launches are not counted. scaling: of SCALINGS, or "exact" for 16-bit attention.
    """
    matmul = 2.0 * shape.batch * shape.heads * shape.seq_q * shape.seq_kv * shape.head_dim
    q = shape.batch * shape.seq_q * shape.heads * shape.head_dim
    k = shape.batch * shape.seq_kv * shape.kv_heads * shape.head_dim
    traffic = 2 * (2 * q + 2 * k)  # Q, K, V read and O written once, 16 bit
    if scaling == EXACT:
        return 2 * matmul / FLOPS_16BIT + traffic / BYTES_PER_SECOND
    prologue = 2 * k + k  # K read in 16 bit, written in INT8
    if scaling == "per_head":
        prologue += 2 * k  # K is read once more, for the reduction
    if SCALINGS[scaling] == "per_token" and scaling not in RULES:
        prologue += 2 * 4 * shape.batch * shape.seq_kv * shape.kv_heads  # a scale per key, written and read
    if rotation == "hadamard":
        prologue += 2 * 2 * (q + k)  # Q and K read and written once more; the rotation's matmul hides behind that
    traffic += prologue - k  # the attention kernel reads K in INT8
    pv_rate = FLOPS_16BIT
    if sage_kernels.RECIPES[recipe].pv != "16bit":
        pv_rate = OPS_INT8
        # V like K: read in 16 bit, written in 8 bit, read in 8 bit. Without a plan, V is read first for its range
        traffic += 2 * k + k - k + (0 if scaling in RULES else 2 * k)
    return matmul / OPS_INT8 + matmul / pv_rate + traffic / BYTES_PER_SECOND


def measured_seconds(
    shape: CallShape, scaling: str, recipe: str, device, dtype, *, rotation: str = "none", repeats: int = 10
) -> float:
    """Return the median wall time of one attention call on random inputs, in seconds.

    Quantisation is included. A first call, which compiles, is not timed.
    """
    queries, keys = ((shape.batch, n, h, shape.head_dim) for n, h in (
        (shape.seq_q, shape.heads), (shape.seq_kv, shape.kv_heads)
    ))  # fmt: skip
    q, k, v = random_inputs((queries, keys, keys), device, dtype)
    if scaling == EXACT:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

        def call():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=shape.heads != shape.kv_heads)
    else:
        state = None
        if scaling in RULES:
            from sage_kernels.planning.state import ScaleState, Site

            scales = ScaleState([Site("timed", shape.kv_heads, shape.head_dim, rotation)], device=device)
            state = scales.head_state(0)
            sage_kernels.sage_attention(q, k, v, recipe=recipe, rotation=rotation, state=state)
            scales.advance(1.0, 1.0)  # makes the plan that the timed calls use

        def call():
            return sage_kernels.sage_attention(
                q, k, v, recipe=recipe, scaling=SCALINGS[scaling], rotation=rotation, state=state
            )

    return median_seconds(call, device, repeats)


def random_inputs(sizes, device, dtype) -> list[torch.Tensor]:
    """Return tensors of N(0, 1) of these sizes, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for size in sizes)
    return [x.to(device, dtype) for x in drawn]


@torch.no_grad()
def median_seconds(call: Callable[[], Any], device, repeats: int) -> float:
    """Return the median wall time of a call in seconds. A first call, which compiles, is not timed."""

    def now() -> float:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    times = []
    for _ in range(repeats + 1):
        start = now()
        call()
        times.append(now() - start)
    return sorted(times[1:])[repeats // 2]


def time_factor(recipe: str, every: int, left_out: float, listed: float) -> float:
    """Return the time of attention with skipped tiles over the time without.

    left_out: share of all pairs of a query tile and a key tile that are skipped. listed: share of the calls that have
    lists of tiles. Each of these calls measures 1 / every of its query tiles, in two passes of Q·Kᵀ.
    """
    scores = 1 / OPS_INT8
    values = 1 / FLOPS_16BIT if sage_kernels.RECIPES[recipe].pv == "16bit" else scores
    return 1 - left_out + listed / every * 2 * scores / (scores + values)


class CostTable:
    """Seconds of every layer of a handle, by scaling, recipe and rotation.

    Args:
        handle: after a run, from which the shapes of the calls are known. kind: "counted" or "measured".
    Attributes: shapes ({layer: [CallShape]}), only of layers that ran in INT8.
    """

    def __init__(self, handle, kind: str):
        self._kind = kind
        self._known: dict[tuple, float] = {}
        self.shapes: dict[str, list[CallShape]] = {}
        for denoiser in handle._denoisers:
            self._device = denoiser.device
            self._dtype = next((p.dtype for p in denoiser.model.parameters()), torch.float32)
            for layer in denoiser.layers:
                shapes = [_shape_of(site) for site in layer.own.sites if site.elements]
                if shapes:
                    self.shapes[denoiser._label(layer.name)] = shapes

    def seconds(
        self, layer: str, scaling: str, recipe: str = sage_kernels.DEFAULT_RECIPE, rotation: str = "none"
    ) -> float:
        """Return the seconds of one layer in one step.

        rotation: "auto" counts as "none", since only a run decides about it.
        """
        rotation = "none" if rotation == "auto" else rotation
        return sum(self._call(shape, scaling, recipe, rotation) for shape in self.shapes[layer])

    def _call(self, shape: CallShape, scaling: str, recipe: str, rotation: str) -> float:
        if find_crossover(gpu_class(self._device) or "", shape.head_dim, recipe, False).tokens == NEVER:
            scaling = EXACT  # INT8 never pays there, so 16-bit attention is what runs
        if self._kind == "counted":
            return counted_seconds(shape, scaling, recipe, rotation)
        what = (shape, scaling, recipe, rotation)
        if what not in self._known:
            self._known[what] = measured_seconds(shape, scaling, recipe, self._device, self._dtype, rotation=rotation)
        return self._known[what]

    def relative(self, config, steps: int, levels=(), skipped=None, linear=(0.0, 0.0)) -> float:
        """Return the time under these options over that of 16 bit; 1 means no gain.

        linear: seconds of a step's linear layers under these options and in 16 bit. Others: those of `run_seconds`.
        """
        pairs = zip(self.run_seconds(config, steps, levels, skipped), linear, strict=True)
        total, exact = (attention + steps * of_step for attention, of_step in pairs)
        return total / exact if exact else 1.0

    def skipped_fraction(self, config, skipped: dict) -> float:
        """Return the share of tile pairs left out, over all layers, each weighted by its time.

        skipped: as for `run_seconds`.
        """
        times = {
            layer: self.seconds(layer, config.scaling.name, config.recipe, config.rotation) for layer in self.shapes
        }
        left_out = sum(time * skipped.get(layer, (0.0, 0.0))[0] for layer, time in times.items())
        return left_out / sum(times.values()) if left_out else 0.0

    def run_seconds(self, config, steps: int, levels=(), skipped=None) -> tuple[float, float]:
        """Return the attention time of a whole run under these options, and that of 16-bit attention.

        Steps in step windows count as 16 bit. Calls that INT8 can't do are left out of both.

        Args:
            steps: denoising steps of a run. levels: noise level of each step, needed if the options keep some noise
                levels in 16 bit.
            skipped: {layer: (share of its tile pairs that were left out, share of its calls with lists of tiles)}.
        Raises: ValueError if the options need levels and their number is not that of the steps.
        """
        from ..diffusion.steps.windows import is_kept, stays_16bit

        by_level = bool(config.keep.noise or any(span for _, span in config.rules("keep_noise")))
        if by_level and len(levels) != steps:
            raise ValueError(f"levels: got {len(levels)} noise levels for {steps} steps, expected one each")
        levels = levels if by_level else [1.0] * steps
        total = exact = 0.0
        for layer in self.shapes:
            own, kept = self.seconds(layer, EXACT), steps
            if not is_kept(config, layer):
                recipe, scaling, rotation, span = (
                    config.of_layer(option, layer) for option in ("recipe", "scaling", "rotation", "keep_noise")
                )
                kept = sum(stays_16bit(config, span, level, i, steps - i) for i, level in enumerate(levels))
                left_out = (skipped or {}).get(layer, (0.0, 0.0))
                lists = 1.0 if config.skip is None else time_factor(recipe, config.skip.every, *left_out)
                total += (steps - kept) * self.seconds(layer, scaling, recipe, rotation) * lists
            total += kept * own
            exact += steps * own
        return total, exact


def _shape_of(site) -> CallShape:
    kv_heads, dim, batch = int(site.seen_kv_heads), int(site.seen_head_dim), int(site.seen_batch)
    seq_q, seq_kv = int(site.seen_seq_q), int(site.seen_seq_kv)
    heads = (int(site.elements) - batch * seq_kv * kv_heads * dim) // (batch * seq_q * dim)
    return CallShape(batch, seq_q, seq_kv, heads, kv_heads, dim)
