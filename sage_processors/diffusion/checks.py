"""Checks of a new handle: there is something to swap, and the options suit the target."""

from __future__ import annotations

import logging
from typing import Any

from sage_kernels.planning.rules import NEED_RUNS

from ..linears.swap_checks import check_patterns_of
from ..linears.weights.layers import choose
from ..option_groups import OF_ATTENTION, Keep
from ..options import SageAttnProcessor
from ..unsupported import REMEDIES
from .calls.call_reasons import layer_reason
from .host.discovery import attention_modules
from .steps.windows import check_patterns


logger = logging.getLogger("sage_processors")


def check_swapped(handle: Any) -> None:
    """Raise ValueError if a handle has swapped nothing, or if its options don't suit its models."""
    if not any(denoiser.layers for denoiser in handle._denoisers):
        found = ", ".join(f"{p.name or 'the model'} ({type(p.model).__name__})" for p in handle._denoisers)
        modules = [module for denoiser in handle._denoisers for _, module in attention_modules(denoiser.model)]
        is_sliced = any(type(module.processor).__name__.startswith("Sliced") for module in modules)
        raise ValueError(
            f"{'pipe' if handle._pipe else 'model'}: got no attention processor that calls "
            f"scaled_dot_product_attention in {found}, expected a diffusers model with at least one"
            + "; attention slicing is on: call pipe.disable_attention_slicing() first"
            * is_sliced
        )
    names = [name for denoiser in handle._denoisers for name in denoiser.layer_names()]
    for option in OF_ATTENTION:
        check_patterns("layers", [pattern for pattern, _ in handle.config.rules(option)], names)
    if handle.config.rules("linears"):
        names = [
            x.name
            for denoiser in handle._denoisers
            for x in choose(denoiser.model, label=denoiser._label, linears="none")
        ]
        check_patterns_of(handle.config, names)
    if handle.following.followed:
        return
    without = "a model without a pipeline" if handle._pipe is None else "a pipeline without a scheduler"
    expected = "expected a pipeline, whose scheduler says where a run is"
    if handle.config.scaling.name in NEED_RUNS:
        raise ValueError(f'scaling: got "{handle.config.scaling.name}" for {without}, {expected}')
    if "auto" in (handle.config.rotation, *(rotation for _, rotation in handle.config.rules("rotation"))):
        raise ValueError(f'rotation: got "auto" for {without}, {expected}')
    if handle.config.skip is not None:
        raise ValueError(f"skip: got {handle.config.skip} for {without}, {expected}")
    if handle.config.keep != Keep():
        raise ValueError(f"keep: got {handle.config.keep} for {without}, {expected}")
    for pattern, noise in handle.config.rules("keep_noise"):
        if noise:
            raise ValueError(f"layers[{pattern!r}]: got keep_noise {noise} for {without}, {expected}")


def warn_of_idle_layers(handle: Any) -> None:
    """Warn of models in which layers are already known to run in 16 bit, before a run shows it."""
    for denoiser in handle._denoisers:
        name = denoiser.name or type(denoiser.model).__name__
        against = [layer_reason(layer) for layer in denoiser.layers]
        if against and all(against):
            found = ", ".join(dict.fromkeys(against))
            logger.warning("%s: got a model in which no attention layer can run in INT8 (%s)", name, found)
        elif handle.config.training != "int8" and any(layer.module.training for layer in denoiser.layers):
            logger.warning("%s: got a model in which some layers run in 16 bit: %s", name, REMEDIES["training"])


def refuse_bare_options(model: Any) -> None:
    """Raise TypeError if somebody set a SageAttnProcessor itself as a module's processor."""
    for name, module in attention_modules(model):
        if isinstance(module.processor, SageAttnProcessor):
            raise TypeError(
                f"model: got a SageAttnProcessor as the processor of {name!r}, expected the model's own processors; "
                "load the model again and give the options to model.set_attn_processor or sage_processors.apply"
            )
