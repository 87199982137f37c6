"""Ways to run a whole model: stock as it comes, on cuDNN, compiled; other packages' attention or linear layers; ours.

A way is named "default", "cudnn", "compiled", "removed" (no attention), "int8" (attention alone), "linears" (with INT8
linear layers, without graphs), by a preset, or by another package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

from bench_end_to_end import OURS, compiled_blocks
from replaced_attention import attention_removed
from rival_attention import ATTENTION_RIVALS, bound, imported, rival_attention
from rival_linears import RIVALS, rival_linears
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_processors as sp
from sage_kernels.facts.recipe import DEFAULT_RECIPE
from sage_processors.linears.weights.layers import choose
from sage_processors.presets import PRESETS


REMOVED, LINEARS = "removed", "linears"
# In the order in which they run: rows of stock stand before ours; packages that may break the process come late, and
# presets that free the model's weights come last
_FREEING = tuple(name for name, options in PRESETS.items() if options["linears"].drop_weights)
NAMES = ("default", "cudnn", "compiled", "torch_flex", REMOVED, "int8", LINEARS)
NAMES += tuple(name for name in PRESETS if name not in _FREEING) + tuple(RIVALS)
NAMES += tuple(name for name in ATTENTION_RIVALS if name not in NAMES) + _FREEING
DEFAULT, CUDNN = "torch_sdpa_default", "torch_sdpa_cudnn"


class Way(NamedTuple):
    """One way.

    Attributes:
        provider, recipe: of its rows in results.csv.
        inside: function of (denoiser, its pipeline or itself) that returns the with-statement around all calls.
    """

    provider: str
    recipe: str
    inside: Callable[[nn.Module, object], AbstractContextManager]


def chosen(names: Iterable[str], min_features: int | None = None) -> Iterator[Way]:
    """Yield the ways with these names in the order of NAMES; say of a package that it is not installed.

    Args: min_features: linear layers with fewer features stay in 16 bit in other packages' ways.
    """
    for name in sorted(set(names), key=NAMES.index):
        if name in ATTENTION_RIVALS:
            for rival in imported([name]):
                yield Way(rival.provider, "", lambda model, _, rival=rival: rival_attention(rival, model))
        elif name in RIVALS:
            yield Way(name, "", lambda model, _, name=name: _linears(name, model, min_features))
        elif name == LINEARS:
            config = sp.SageAttnProcessor(linears=sp.Linears("int8"))
            yield Way(OURS, f"{DEFAULT_RECIPE}+linears_int8", lambda _, pipe, config=config: sp.apply(pipe, config))
        elif name in ("int8", *PRESETS):
            preset = None if name == "int8" else name
            recipe = DEFAULT_RECIPE if preset is None else f"preset_{preset}"
            yield Way(OURS, recipe, lambda _, pipe, preset=preset: sp.apply(pipe, sp.SageAttnProcessor(preset)))
        else:
            yield {
                "default": Way(DEFAULT, "", lambda *_: nullcontext()),
                "cudnn": Way(CUDNN, "", lambda *_: cudnn_first()),
                REMOVED: Way("attention_removed", "", lambda *_: attention_removed()),
                "compiled": Way("torch_compiled_cudnn", "", lambda model, _: _compiled(model)),
            }[name]


def is_8_bit(provider: str) -> bool:
    """Return True for ours and for packages that quantise: their rows have an error."""
    return provider in (OURS, *RIVALS) or bound(provider) is not None


def cudnn_first() -> AbstractContextManager:
    """Prefer cuDNN. A VAE's heads of 512 channels and text encoders' masks may have no kernel there."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


@contextmanager
def _compiled(model: nn.Module):
    with cudnn_first(), compiled_blocks(model):
        yield


@contextmanager
def _linears(name: str, model: nn.Module, min_features: int | None):
    """Stock on cuDNN, compiled, with the linear layers that run in 8 bit in ours quantised by another package."""
    choices = choose(model, label=str, linears="int8", min_features=min_features)
    layers = [choice.module for choice in choices if choice.format != "none"]
    if not layers:
        raise ValueError(f"{name}: no linear layer that is worth 8 bit")
    with ExitStack() as stack:
        stack.enter_context(rival_linears(name, layers))
        stack.enter_context(_compiled(model))
        yield
