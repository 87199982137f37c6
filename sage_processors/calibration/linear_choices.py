"""Choose the format of each linear layer by its cost and by its effect on the model's output.

On some steps of a stock run, the denoiser is called again with one layer in 8 bit, and its output is compared with the
stock output. A layer's own error would say less: nearly all layers have the same, but few of them change a picture.
Candidates begin with all layers in the cheapest format. Each makes one more change, the one that removes most error
for its time, until all layers are in 16 bit.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F

import sage_kernels
from sage_kernels.compat import map_only

from ..diffusion.host.discovery import denoisers
from ..linears.swap import LinearSwap
from ..linears.weights.layers import choose
from ..option_groups import LayerRule
from ..options import SageAttnProcessor
from .candidates import spread
from .cost import FLOPS_16BIT, OPS_INT8, median_seconds, random_inputs


EXACT = "none"
SAMPLED_STEPS = 2


@dataclass
class Layer:
    """One linear layer that is searched.

    Attributes:
        module: the layer. rows: of its inputs in the sampled run, over all calls.
        seconds: {format: time of one call}; format "none" is 16 bit.
        errors: {format: squared relative error of the denoiser's output with this layer alone in the format, mean over
            the sampled steps}; 0 in 16 bit.
    """

    module: Any
    rows: int
    seconds: dict[str, float]
    errors: dict[str, float]

    @property
    def operations(self) -> int:
        """Operations of all calls, 2 · rows · in_features · out_features."""
        return 2 * self.rows * self.module.in_features * self.module.out_features


class LinearChoices:
    """Cost and error of linear layers in 8-bit formats, and candidate options made from them.

    Args:
        pipe: a stock pipeline.
        config: its linears.min_features and the linears of its layers say which layers are searched.
        formats: to try, "int8" and "fp8".
        draw: draws a picture with the pipeline and calls its argument, on_step, after each step.
        steps: denoising steps of a run. batch: pictures per call for which costs are computed.
        kind: "counted" (operations alone) or "measured". show: of a progress bar.
    Attributes: layers: {name: Layer}. base: the cheapest format.
    Raises: ValueError if there is no layer to search.
    """

    def __init__(
        self, pipe: Any, config: SageAttnProcessor, formats: Sequence[str], draw: Callable, steps: int, batch: int,
        kind: str, show,
    ) -> None:  # fmt: skip
        self._formats, self.layers = tuple(formats), {}
        models = denoisers(pipe)
        options = {"layers": config.rules("linears"), "min_features": config.linears.min_features}
        own = [pattern for pattern, _ in config.rules("linears")]
        found = {
            name: [
                choice
                for choice in choose(model, label=_labels(name), linears=formats[0], **options)
                if choice.format != EXACT and not any(fnmatchcase(choice.name, pattern) for pattern in own)
            ]
            for name, model in models.items()
        }
        with _Recorder(models, [c.module for choices in found.values() for c in choices], steps) as seen:
            draw(seen.on_step)
        for name, choices in found.items():
            errors = _errors(models[name], name, choices, self._formats, options, seen.inputs[name], show)
            for choice in choices:
                rows, module = seen.rows.get(id(choice.module), 0), choice.module
                if rows:
                    tokens = batch * rows // seen.calls[id(module)]
                    seconds = {f: _seconds(tokens, module, f, kind) for f in (*formats, EXACT)}
                    self.layers[choice.name] = Layer(module, rows, seconds, errors[choice.name] | {EXACT: 0.0})
        if not self.layers:
            raise ValueError(
                "linears: got no linear layer that runs in 8 bit, expected some; see Linears.min_features and "
                "handle.report()"
            )
        total = {f: sum(layer.seconds[f] for layer in self.layers.values()) for f in self._formats}
        self.base = min(self._formats, key=total.__getitem__)  # of equally dear ones the first

    def seconds(self, config: SageAttnProcessor) -> tuple[float, float]:
        """Return the seconds of one call of every layer, under these options and in 16 bit."""
        layers = self.layers.items()
        own = sum(layer.seconds[config.of_layer("linears", name)] for name, layer in layers)
        return own, sum(layer.seconds[EXACT] for _, layer in layers)

    def share(self, config: SageAttnProcessor) -> float:
        """Return the share of the searched layers' operations that runs in 8 bit under these options."""
        layers = self.layers.items()
        own = sum(layer.operations for name, layer in layers if config.of_layer("linears", name) != EXACT)
        return own / sum(layer.operations for _, layer in layers)

    def candidates(self, base: SageAttnProcessor) -> list[SageAttnProcessor]:
        """Return options by falling error of linear layers, each dearer than the one before."""
        moves = []
        for name, layer in self.layers.items():
            moves += [(gain, name, format) for gain, format in _moves(layer, base.linears.format)]
        chosen: dict[str, str] = {}
        found = []
        for _, name, format in sorted(moves, key=lambda move: (-move[0], move[1])):
            chosen[name] = format
            found.append(self._options(base, chosen))
        return spread(found)

    def roles(self, base: SageAttnProcessor) -> list[SageAttnProcessor]:
        """Return candidates in which all layers of a role go to 16 bit together, in all blocks.

        A role is a layer's name without the number of its block. The errors of single layers, measured on few steps,
        do not always tell what a whole run makes of them.
        """
        groups: dict[str, list[str]] = {}
        for name in self.layers:
            groups.setdefault(re.sub(r"\.\d+(?=\.)", ".*", name), []).append(name)

        def gain(names: list[str]) -> float:
            own = [self.layers[name] for name in names]
            saved = sum(layer.seconds[EXACT] - layer.seconds[base.linears.format] for layer in own)
            return sum(layer.errors[base.linears.format] for layer in own) / max(saved, 1e-30)

        chosen: dict[str, str] = {}
        found = []
        for names in sorted(groups.values(), key=lambda names: (-gain(names), names)):
            chosen |= dict.fromkeys(names, EXACT)
            found.append(self._options(base, chosen))
        return found

    def _options(self, base: SageAttnProcessor, chosen: dict[str, str]) -> SageAttnProcessor:
        return base.with_rules(
            *(LayerRule(glob.escape(name), linears=chosen[name]) for name in self.layers if name in chosen)
        )


def _labels(part: str) -> Callable[[str], str]:
    return lambda name: f"{part}.{name}" if part else name


def _moves(layer: Layer, start: str) -> list[tuple[float, str]]:
    """Return the best next formats from `start` to 16 bit, as (error removed per second, format).

    These are the corners of the lower convex hull of error over time.
    """
    moves, at = [], start
    while at != EXACT:
        ways = [
            ((layer.errors[at] - layer.errors[f]) / max(layer.seconds[f] - layer.seconds[at], 1e-30), f)
            for f in layer.seconds
            if layer.errors[f] < layer.errors[at]
        ]
        if not ways:
            break
        moves.append(max(ways))
        at = moves[-1][1]
    return moves


class _Recorder:
    """Hooks that record a stock run: rows of each layer's inputs, and the denoisers' inputs on some steps."""

    def __init__(self, models: dict[str, Any], modules: Sequence[Any], steps: int) -> None:
        self.rows: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.inputs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in models}
        self._models, self._modules, self._step = models, modules, 0
        count = min(SAMPLED_STEPS, steps)
        self._wanted = {(2 * i + 1) * steps // (2 * count) for i in range(count)}
        self._taken: set[tuple[str, int]] = set()

    def on_step(self) -> None:
        self._step += 1

    def _see(self, module: Any, args: Any) -> None:
        x = args[0]
        self.rows[id(module)] = self.rows.get(id(module), 0) + x.numel() // x.shape[-1]
        self.calls[id(module)] = self.calls.get(id(module), 0) + 1

    def _take(self, name: str, args: Any, kwargs: Any) -> None:
        if self._step in self._wanted and (name, self._step) not in self._taken:
            self._taken.add((name, self._step))
            copy = map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
            self.inputs[name].append(copy)

    def __enter__(self) -> _Recorder:
        self._hooks = [module.register_forward_pre_hook(self._see) for module in self._modules]
        for name, model in self._models.items():

            def take(_, args, kwargs, name=name):
                self._take(name, args, kwargs)

            self._hooks.append(model.register_forward_pre_hook(take, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _outputs(model: Any, inputs: Sequence[tuple[Any, Any]]) -> list[torch.Tensor]:
    found = []
    for args, kwargs in inputs:
        out = model(*args, **kwargs)
        out = out.to_tuple() if hasattr(out, "to_tuple") else out
        tensors: list[torch.Tensor] = []
        map_only(torch.Tensor, tensors.append, out)
        found.append(torch.cat([x.flatten().float() for x in tensors]))
    return found


def _errors(model: Any, name: str, choices: Sequence[Any], formats, options, inputs, show) -> dict[str, dict]:
    """Return {layer: {format: squared relative error of the model's output}}."""
    found: dict[str, dict[str, float]] = {choice.name: {} for choice in choices}
    if not (choices and inputs):
        return found
    with torch.no_grad():
        stock = _outputs(model, inputs)
        for format in formats:
            on_layer = show(f"linear layers of {name or 'the model'} in {format}, one by one", len(choices))
            with LinearSwap(model, linears=format, name=name, **options) as swap:
                for state in swap.states():
                    state.is_resting = True
                for choice in choices:
                    state = choice.module._sage
                    state.is_resting = False
                    error = [
                        ((a - b).double().square().sum() / b.double().square().sum()).item()
                        for a, b in zip(_outputs(model, inputs), stock, strict=True)
                    ]
                    state.is_resting = True
                    # rounded, so that a last digit does not decide which of two layers comes first
                    found[choice.name][format] = float(f"{sum(error) / len(error):.6e}")
                    if on_layer is not None:
                        on_layer()
    return found


def _seconds(rows: int, module: Any, format: str, kind: str) -> float:
    """Return the seconds of one call of a layer, by the rates of a data sheet or measured."""
    if kind == "counted":
        return 2.0 * rows * module.in_features * module.out_features / (FLOPS_16BIT if format == EXACT else OPS_INT8)
    return measured_linear_seconds(rows, module.weight, format)


def measured_linear_seconds(rows: int, weight: torch.Tensor, format: str, *, repeats: int = 10) -> float:
    """Return the median wall time of one call on random inputs [rows, K], in seconds.

    Quantisation of the inputs is included. A first call, which compiles, is not timed.
    """
    (x,) = random_inputs([(rows, weight.shape[1])], weight.device, weight.dtype)
    if format == EXACT:
        return median_seconds(lambda: F.linear(x, weight), weight.device, repeats)
    with torch.no_grad():
        ready = sage_kernels.quantize_weight(weight, format=format)

    def call() -> Any:
        return sage_kernels.quantized_linear(sage_kernels.quantize_activation(x, format=format), ready, dtype=x.dtype)

    return median_seconds(call, weight.device, repeats)
