"""Compile the kernels of a handle's layers ahead of their first calls, for all steps of a run.

Compiling runs in the background. It starts with the swap if the model is on a GPU, else with the first forward.
`handle.warm_up()` waits for it. The kernels depend on options and heads, and hardly on the lengths of calls. Masks and
dtypes that could not be foreseen show in the first forward. The second forward starts the kernels that they need.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sage_kernels.checks import MAX_HEAD_DIM
from sage_kernels.facts.crossover import is_short
from sage_kernels.facts.numerics import CODE_TYPES
from sage_kernels.facts.recipe import MIXED_RECIPE
from sage_kernels.ops.warm_up import (
    LONG,
    SHORT,
    CallKind,
    HeadsKind,
    LinearKind,
    compile_ahead,
    get_ready,
    heads_call,
    linear_calls,
    loaded_kernels,
    weight_calls,
)
from sage_kernels.planning.state import closing_call

from ...linears.postponed.norm_layers import ANY_WIDTH, NormState, norm_width
from ...reporting.progress import progress_bar
from ..calls.processor_state import CallSite
from ..heads.head_norms import HeadNormState
from ..heads.rotary import is_rotary, usual_angles
from ..host.discovery import discover_sites


logger = logging.getLogger("sage_processors")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Compiling is started in the first forward, which may be the first one on a GPU, and again in the second one. By then
# the call sites know the dtypes and masks of their calls.
FORWARDS = 2
SHOWN = 6  # compiled kernels in a report
USUAL_DEPTH = 3072  # of a weight; kernels are the same for all multiples of 16


class WarmUp(NamedTuple):
    """Result of `handle.warm_up`.

    Attributes: kernels: number that the model needs. seconds: duration. cached: kernels that were compiled before.
    """

    kernels: int
    seconds: float
    cached: int


class KernelsAhead:
    """Starts compiling the kernels of a handle's denoisers in the background.

    Never raises, because a launch compiles a missing kernel anyway.
    """

    def __init__(self):
        # denoiser -> forwards seen, up to FORWARDS
        self._forwards: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._before = len(loaded_kernels())

    def note(self) -> str:
        """Return a note for the report on kernels that were loaded since the swap; "" if there are none."""
        found = loaded_kernels()[self._before :]
        compiled = sorted((x for x in found if not x.was_there), key=lambda x: x.seconds, reverse=True)
        there = len(found) - len(compiled)
        text = f"{len(found)} kernels were loaded in this process since the swap, {there} of them without compiling"
        slowest = ", ".join(f"{x.name} {x.seconds:.1f} s" for x in compiled[:SHOWN])
        more = f" and {len(compiled) - SHOWN} more" * (len(compiled) > SHOWN)
        return f"{text}{f'; compiled: {slowest}{more}' * bool(compiled)}." if found else ""

    def get_ready(self, models, format: str) -> None:
        """Begin what the first launches in a process wait for, if one of these models is on a GPU.

        format: of the 8-bit weights that will be made.
        """
        try:
            for first in (next(model.parameters(), None) for model in models):
                if first is None or first.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
                    continue
                get_ready()
                if format in CODE_TYPES and first.dtype in _DTYPES:
                    compile_ahead([], first.device, weight_calls(first.dtype, format, USUAL_DEPTH, first.device))
                return
        except Exception as error:
            logger.debug("kernels are made ready when they are called for: %s", error)

    def swapped(self, denoiser, linears=None) -> None:
        """Start compiling for a denoiser with newly swapped layers.

        linears: its LinearSwap, if the denoiser does not have it yet.
        """
        self._forwards[denoiser] = 0
        self._start(denoiser, linears)

    def before_forward(self, denoiser) -> None:
        """Start compiling at the first forwards of a denoiser.

        Not to be called while torch.compile or a CUDA graph records the forward.
        """
        seen = self._forwards.get(denoiser, 0)
        if seen < FORWARDS:
            self._forwards[denoiser] = seen + 1
            self._start(denoiser)

    def _start(self, denoiser, linears=None) -> None:
        if not _on_a_gpu(denoiser):
            return
        try:
            known = [site for layer in denoiser.layers for site in layer.own.sites if site.seen_kind is not None]
            kinds = call_kinds(denoiser, denoiser.device, only_seen=bool(known))
            if len({kind.head_dim for kind in kinds}) > 1 and not known:
                return  # heads of several head_dims: the first forward tells which of them run in INT8
            _compile(denoiser, kinds, denoiser.device, only_seen=bool(known), linears=linears)
        except Exception as error:  # the call that needs the kernel will raise the error itself
            logger.debug("kernels are compiled when they are called for: %s", error)


def _on_a_gpu(denoiser) -> bool:
    """True if a denoiser is on a GPU and no CUDA graph is being captured.

    A capture would record the extra launches.
    """
    return denoiser.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def warm_up(denoisers, *, progress: bool = True, device: torch.device | None = None) -> WarmUp:
    """Compile the kernels of these denoisers and wait for them: see Handle.warm_up."""
    began, started = time.perf_counter(), []
    for denoiser in denoisers:
        where = denoiser.device if device is None else device
        if where.type == "cuda":
            started.append(_compile(denoiser, call_kinds(denoiser, where, all_steps=True), where))
    jobs = {job.kind: job for compiling in started for job in compiling.jobs}
    known = {kind for compiling in started for kind in compiling.known} - set(jobs)
    with progress_bar(progress and bool(jobs)) as show:
        on_kernel = show("compiling kernels", len(jobs))
        for job in jobs.values():
            job.finished.wait()
            if on_kernel is not None:
                on_kernel()
    for compiling in started:
        compiling.wait()
    cached = len(known) + sum(job.cached is True for job in jobs.values())
    return WarmUp(len(jobs) + len(known), time.perf_counter() - began, cached)


def call_kinds(denoiser, device: torch.device, *, all_steps: bool = False, only_seen: bool = False) -> list[CallKind]:
    """Return the kinds of INT8 calls of a denoiser's layers, the most frequent kind first.

    Args:
        all_steps: count on row maxima being kept from step to step, even if no step was announced so far.
        only_seen: only call sites that ran.
    """
    found: dict[CallKind, int] = {}
    for _, kind in _calls_of(denoiser, device, all_steps, only_seen):
        found[kind] = found.get(kind, 0) + 1
    return sorted(found, key=lambda kind: found[kind], reverse=True)


def heads_kinds(denoiser, device: torch.device, *, only_seen: bool = False) -> list[HeadsKind]:
    """Return the kinds of fused norm and rotary embedding in front of these calls.

    Angles are assumed to have the form that most models use.
    """
    found = []
    for layer, kind in _calls_of(denoiser, device, False, only_seen):
        rotary = layer.sage._sage_binding.rotary
        norm = layer.module._modules.get("norm_q")
        state = getattr(norm, "_sage", None)
        if rotary is None and not isinstance(state, HeadNormState):
            continue
        weight = None
        is_rms = isinstance(state, HeadNormState) and state.kind == "rms"
        if is_rms:
            weight = norm._parameters.get("weight")
        dtype = None if weight is None else weight.dtype
        across = is_rms and norm_width(norm) not in (None, ANY_WIDTH, kind.head_dim)
        made = HeadsKind(kind.dtype, kind.head_dim, is_rms, dtype, *usual_angles(rotary or ""), across)
        made = made._replace(rotates=rotary is not None)
        # models that import the rotary embedding where it is called rotate the image's tokens alone
        apart = [made._replace(rotates=False)] * any(map(is_rotary, layer.sage._sage_binding.imported))
        found += [made, *apart]
    return list(dict.fromkeys(found))


def linear_kinds(denoiser, linears=None) -> list[LinearKind]:
    """Return the kinds of 8-bit linear layers of a denoiser, with the usual norms and activations.

    A norm as wide as the input is assumed to come before, an activation of the model after a layer that widens, and a
    gate and a residual after one whose result is as wide as a norm. An input that is as wide as no norm and no result,
    but as one of each together, is the two side by side. linears: a LinearSwap; by default the denoiser's.
    """
    linears = linears or denoiser.linears
    if linears is None:
        return []
    modules = list(denoiser.model.modules())
    norms: dict[int | None, set[str]] = {}
    for module in modules:
        if isinstance(module.__dict__.get("_sage"), NormState):
            norms.setdefault(norm_width(module), set()).add(module._sage.kind)
    activations = {name for name in map(_activation, modules) if name}
    results = {state.storage.modules[state.index].out_features for state in linears.states()}
    found = []
    for state in linears.states():
        module = state.storage.modules[state.index]
        depth, columns = module.in_features, module.out_features
        plain = LinearKind(_dtype_of(module), state.format, depth, columns, module.bias is not None)
        if state.is_weight_only:
            found.append(plain)
            continue
        is_joined = depth not in results and depth not in norms
        beside = next((depth - width for width in norms if depth - (width or depth) in results), 0) if is_joined else 0
        plain = plain._replace(beside=beside)
        widens = activations if columns > depth else ()
        kinds = [plain._replace(activation=name) for name in ("none", *sorted(widens))]
        kinds += [plain._replace(adds=True)] if columns in norms else []
        before = norms.get(depth, set()) | norms.get(ANY_WIDTH, set())
        found += [kind._replace(norm=norm) for kind in kinds for norm in ("none", *sorted(before))]
    return list(dict.fromkeys(found))


def _activation(module) -> str:
    """Return the name in `quantized_linear` of the activation that a module is; "" for any other module."""
    name = type(module).__name__
    if "GELU" in name or "GEGLU" in name:
        tanh = "_tanh" if module.__dict__.get("approximate") == "tanh" else ""
        return ("geglu" if "GEGLU" in name else "gelu") + tanh
    return {"SwiGLU": "swiglu", "LuminaFeedForward": "swiglu"}.get(name, "")


def _calls_of(denoiser, device: torch.device, all_steps: bool, only_seen: bool) -> Iterator[tuple[Any, CallKind]]:
    """Yield (layer, kind) for each kind of INT8 call at each call site."""
    for layer in denoiser.layers:
        if layer.own.config.recipe == MIXED_RECIPE:
            continue  # these kernels are compiled in the first call
        if layer.own.kept or (layer.module.training and not only_seen):
            continue
        shapes = discover_sites(layer.module, layer.sage)
        indices = layer.site_indices or [None] * len(shapes)
        for site, shape, index in zip(layer.own.sites, shapes, indices, strict=False):
            if shape is None or shape[1] > MAX_HEAD_DIM or (only_seen and site.seen_kind is None):
                continue
            for kind in _kinds_of(site, layer, shape[1], index is not None, device):
                if kind.tokens:
                    told = all_steps or denoiser.follows_scheduler or denoiser.is_told
                    skips = site.skip_lists is not None and kind.by_key is None and not kind.causal
                    compensates = skips and site.skip_lists.compensates
                    keeps = {"keeps_rows": site.keeps_rows and told, "skips": skips, "compensates": compensates}
                    yield layer, kind._replace(**keeps)


def _kinds_of(site: CallSite, layer, head_dim: int, planned: bool, device: torch.device):
    """Yield the kinds of calls of one call site, one for each rotation that they may have.

    `keeps_rows`, `skips` and `compensates` are left at their defaults.
    """
    config = layer.own.config
    dtype, causal, by_key = site.seen_kind or (_dtype_of(layer.module), "", None)
    if site.seen_kind is None:
        lengths = tuple(length for length in (LONG, SHORT) if _is_worth_it(length, head_dim, config, device))
    else:
        lengths = (LONG if int(site.seen_seq_kv) >= LONG else SHORT,)
    rotations = {"hadamard" if layer.own.rotated else "none"}
    if config.rotation == "auto":
        rotations = {"none", "hadamard"}
    for rotation in sorted(rotations, reverse=True):
        yield CallKind(
            dtype, head_dim, config.recipe, "planned" if planned else config.scaling.of_call, rotation,
            causal=causal, by_key=by_key, tokens=lengths,
        )  # fmt: skip


def _is_worth_it(tokens: int, head_dim: int, config, device: torch.device) -> bool:
    """True if any call with the kernels of this length is long enough for INT8."""
    longest = LONG - 1 if tokens < LONG else 2**24
    return not is_short(
        device, batch=2**16, heads=1, seq_q=longest, seq_kv=longest, head_dim=head_dim, recipe=config.recipe,
        min_tokens=config.min_tokens,
    )  # fmt: skip


def _dtype_of(module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.dtype in _DTYPES), torch.bfloat16)


def _compile(denoiser, kinds, device: torch.device, only_seen: bool = False, linears=None):
    """Start compiling for these calls, the heads in front of them, and the end of a step."""
    others: list[Any] = [heads_call(kind, device) for kind in heads_kinds(denoiser, device, only_seen=only_seen)]
    if not only_seen:
        others += [call for kind in linear_kinds(denoiser, linears) for call in linear_calls(kind, device)]
    closing = None if denoiser.state is None else closing_call(denoiser.state, device)
    return compile_ahead(kinds, device, others + ([] if closing is None else [closing]))
