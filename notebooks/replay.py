"""Record the attention inputs of a denoising run, and run them through every scaling, step by step.

The notebook timestep_scaling.py uses it to show the error of a scaling at a single step. The recorded Q, K and V are
those of the stock model, so an error at one step does not change the next.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from sage_kernels import sage_attention
from sage_kernels.facts.recipe import INT8_MAX
from sage_kernels.facts.state import PLAN_CENTER, PLAN_K_WEIGHT
from sage_kernels.planning.rules import rule_for
from sage_kernels.planning.state import ScaleState, Site
from sage_processors.diffusion.steps.noise_level import noise_levels
from sage_processors.evaluation import quality
from sage_processors.evaluation.metrics import sqnr_db


TILE = 128  # keys that share a scale in the reference path


@dataclass
class Recording:
    """Attention inputs of one run.

    Attributes:
        levels: noise level u of each step, 1 is pure noise. steps: per step {layer: [(q, k, v) of each call]}, tensors
            [B, S, H, D]; only calls with `least` or more queries and keys, which are those that run in INT8.
    """

    levels: list[float] = field(default_factory=list)
    steps: list[dict[str, list[tuple]]] = field(default_factory=list)

    def sites(self) -> list[Site]:
        """One site per recorded layer, in order of execution."""
        return [Site(name, calls[0][1].shape[2], calls[0][1].shape[3]) for name, calls in self.steps[0].items()]


class _Recorder(TorchFunctionMode):
    def __init__(self, least: int):
        super().__init__()
        self.least, self.layer, self.calls = least, "", defaultdict(list)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            inputs = [named[name].detach().transpose(1, 2) for name in ("query", "key", "value")]
            if min(inputs[0].shape[1], inputs[1].shape[1]) >= self.least:
                self.calls[self.layer].append(tuple(inputs))
        return func(*args, **kwargs)


def record(pipe, prompts, seeds, *, steps: int, least: int = 128, **arguments) -> Recording:
    """Run a text-to-image pipeline with its own attention and record its attention inputs.

    Args: as `quality.generate`. least: fewest queries and keys of a call that is kept.
    """
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    recorder, recording = _Recorder(least), Recording()
    hooks = [
        module.register_forward_pre_hook(lambda *_, layer=name: setattr(recorder, "layer", layer))
        for name, module in denoiser.named_modules()
        if hasattr(module, "processor")
    ]

    def end_of_step():
        recording.steps.append(dict(recorder.calls))
        recorder.calls = defaultdict(list)

    try:
        with recorder:
            quality.generate(pipe, prompts, seeds, steps=steps, on_step=end_of_step, **arguments)
    finally:
        for hook in hooks:
            hook.remove()
    recording.levels = noise_levels(pipe.scheduler).tolist()[: len(recording.steps)]
    return recording


@dataclass
class Step:
    """Error and use of plans at one step of a run with one scaling, over all layers and heads.

    Attributes:
        level: noise level u. sqnr_db: attention output against fp32 attention, mean over layers, dB.
        utilisation: largest code of a key tile under the plan over 127, mean over tiles that fit their plan; nan
            without plans. Below 7/8 a tile gets a scale of its own.
        beyond: share of the tiles of planned heads that did not fit their plan and got a larger scale; nan without.
        planned: share of heads that had a plan.
    """

    level: float
    sqnr_db: float
    utilisation: float = float("nan")
    beyond: float = float("nan")
    planned: float = 0.0


def replay(config, recording: Recording, first: Recording | None = None) -> tuple[list[Step], ScaleState | None]:
    """Run recorded calls with the options `config`, and compare each with fp32 attention.

    Args:
        config: SageAttnProcessor. recording: of the calls. first: an earlier run, from which planned scales learn; the
            table it leaves is frozen, except for "timestep_adaptive".
    Returns: one Step per step, and the scale state afterwards (None for scales computed from each call).
    """
    sites = recording.sites()
    state = None
    if config.scaling.is_planned:
        state = ScaleState(sites, device="cpu", margin=config.scaling.margin, rule=rule_for(config.scaling))
    found = []
    for run in [first, recording] if first is not None and state is not None else [recording]:
        found = []
        if state is not None:
            state.begin_run(run.levels[0])
        for place, step in enumerate(run.steps):
            found.append(_step(config, step, run.levels[place], sites, state, measured=run is recording))
            if state is not None:
                state.advance(run.levels[place], run.levels[min(place + 1, len(run.levels) - 1)])
        if run is first and not state.rule.adapts:
            state.freeze()
    return found, state


def _step(config, step, level, sites, state, *, measured: bool) -> Step:
    ratios, tiles, planned = [], [], []
    plan = None if state is None else state.snapshot()
    row = 0
    for index, site in enumerate(sites):
        noise = signal = 0.0
        for q, k, v in step[site.name]:
            head_state = None if state is None else state.head_state(index)
            out = sage_attention(q, k, v, recipe=config.recipe, scaling=config.scaling.of_call, state=head_state)
            if not measured:
                continue
            exact = exact_attention(q, k, v)
            noise += (out - exact).double().square().sum().item()
            signal += exact.double().square().sum().item()
            if plan is not None:
                rows = slice(row, row + site.kv_heads)
                on = plan["plan_scale"][rows] > 0
                planned.append(on.float())
                tiles.append(_tile_reach(k, plan["plan"][rows, :, : site.head_dim])[:, on].flatten())
        row += site.kv_heads
        if measured:
            ratios.append(10 * torch.tensor(signal / noise).log10().item())
    if not measured:
        return Step(level, float("nan"))
    mean = sum(ratios) / len(ratios)
    if plan is None or torch.cat(tiles).numel() == 0:
        return Step(level, mean)
    reach, kept = torch.cat(tiles), torch.cat(tiles) <= INT8_MAX
    utilisation = (reach[kept] / INT8_MAX).mean().item() if kept.any() else float("nan")
    return Step(level, mean, utilisation, (~kept).float().mean().item(), torch.cat(planned).mean().item())


def _tile_reach(k: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """Return the largest |code| of every key tile of k [B, S, H, D] under a plan [H, 4, D].

    Returns: [B, H, tiles].
    """
    codes = ((k - plan[:, PLAN_CENTER]) * plan[:, PLAN_K_WEIGHT]).abs().amax(-1).transpose(1, 2)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % TILE))
    return padded.unflatten(-1, (-1, TILE)).amax(-1)


def exact_attention(q, k, v) -> torch.Tensor:
    """Return attention in fp32 of q, k, v [B, S, H, D]."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def without_guard(recording: Recording, exponent: float) -> list[float]:
    """Return the SQNR in dB per step of K scales by a formula of the noise level, without a guard.

    One scale per head, s = s_ref · (u / u_ref) ** exponent. Codes beyond ±127 are CLIPPED, since there is no guard as
    in our scalings. s_ref fits the step in the middle of the run. Q has a scale for each row, K's mean is removed.
    exponent -1: the formula as printed; 1: as corrected; 0: one scale for all steps.
    """
    middle = len(recording.steps) // 2
    s_ref, u_ref = {}, recording.levels[middle]
    for layer, calls in recording.steps[middle].items():
        reach = torch.stack([(k - k.mean(1, keepdim=True)).abs().amax((0, 1, 3)) for _, k, _ in calls]).amax(0)
        s_ref[layer] = reach[:, None] / INT8_MAX
    found = []
    for level, step in zip(recording.levels, recording.steps, strict=True):
        ratios = []
        for layer, calls in step.items():
            scale = s_ref[layer] * (level / u_ref) ** exponent
            ours, exact = [], []
            for q, k, v in calls:
                center = k.mean(1, keepdim=True)
                k_codes = ((k - center) / scale).round().clamp(-INT8_MAX, INT8_MAX)
                q_scale = q.abs().amax(-1, keepdim=True) / INT8_MAX
                ours.append(exact_attention((q / q_scale).round() * q_scale, k_codes * scale, v))
                exact.append(exact_attention(q, k, v))
            ratios.append(sqnr_db(torch.cat(ours), torch.cat(exact)).item())
        found.append(sum(ratios) / len(ratios))
    return found
