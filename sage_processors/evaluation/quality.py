"""Compare INT8 attention with stock: pictures or clips by seed, and attention output by batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sage_kernels.planning.rules import ADAPTIVE, FROM_TABLE

from ..diffusion.steps.windows import CHOSEN
from ..options import SageAttnProcessor
from ..reporting.layer_report import NOTHING_RAN
from . import metrics, videos


# dB; identical pictures would make every mean infinite, and fp32 pictures show no difference above
PSNR_CEILING = 120.0
# INT8 itself is measured, so it runs at lengths for which a GPU's table would choose 16 bit, as it would for all calls
# of the embedded pipelines. Texts of 77 tokens run in 16 bit, as they do on every GPU.
MIN_TOKENS = 128
WARM_UP_SEED = 2**20  # first seed of the unmeasured run, far from the measured ones


@dataclass(frozen=True)
class Variant:
    """One way of running INT8 attention, to be compared by `evaluate`.

    Attributes:
        name: second half of the results' case, `{pipeline}/{name}`.
        config: the options under test.
        warm: run once unmeasured, freeze the table of scales that this leaves, and start every batch from it
            ("timestep_adaptive" keeps its state from batch to batch instead). If False, every batch starts with a
            fresh state.
    """

    name: str
    config: SageAttnProcessor
    warm: bool = False


@dataclass(frozen=True)
class Quality:
    """Distances of one variant to stock attention.

    Attributes:
        name, recipe: of the variant. recipe is empty for a result of `floor`.
        psnr_db: dB, one per picture, at most PSNR_CEILING. ssim: one per picture. For a clip, means over its frames.
        attention_sqnr_db: dB, one per batch of pictures, at most PSNR_CEILING. Signal over noise of attention's output
            against the model's own attention of the same inputs, both summed over all layers, heads and steps. Empty
            if it was not measured. Unlike the pictures' numbers, it does not depend on how a sampler amplifies an
            early difference.
        int8_calls, fallback_calls: attention calls that ran in INT8, and calls that ran the model's own attention.
        chosen_calls: fallback calls that the options keep in 16 bit (by step, noise level or layer).
    """

    name: str
    recipe: str
    psnr_db: tuple[float, ...]
    ssim: tuple[float, ...]
    int8_calls: int = 0
    fallback_calls: int = 0
    chosen_calls: int = 0
    attention_sqnr_db: tuple[float, ...] = ()

    @property
    def is_ours(self) -> bool:
        """True unless calls were counted and none of them ran in INT8."""
        return self.int8_calls > 0 or self.fallback_calls == 0

    @property
    def int8_share(self) -> float:
        """Share of the calls supported in INT8 that ran in INT8; 0 without such calls."""
        possible = self.int8_calls + self.chosen_calls
        return self.int8_calls / possible if possible else 0.0

    def rows(self, pipeline: str) -> Iterator[dict]:
        """Yield rows of results.csv, for each metric the median with percentiles, the mean and the worst.

        Samples are pictures, and for attention_sqnr_db batches of pictures. The column batch counts pictures. If the
        options keep calls in 16 bit, int8_share is a row too.
        Raises: ValueError if no call ran in INT8.
        """
        if not self.is_ours:
            raise ValueError(f"results: got {self.name!r} of {pipeline}, in which {NOTHING_RAN}; nothing to record")
        common = {
            "suite": "quality",
            "case": f"{pipeline}/{self.name}",
            "provider": "sage_kernels" if self.recipe else "torch_sdpa",
            "recipe": self.recipe,
            "batch": len(self.psnr_db),
        }
        samples = [("psnr_db", "dB", self.psnr_db), ("ssim", "1", self.ssim)]
        if self.attention_sqnr_db:
            samples.append(("attention_sqnr_db", "dB", self.attention_sqnr_db))
        for metric, unit, values in samples:
            low, middle, high = torch.tensor(values, dtype=torch.float64, device="cpu").quantile(
                torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64, device="cpu")
            )
            digits = 2 if unit == "dB" else 6
            spread = {"p20": round(low.item(), digits), "p80": round(high.item(), digits)}
            yield {**common, "metric": metric, "unit": unit, "median": round(middle.item(), digits), **spread}
            mean = sum(values) / len(values)
            yield {**common, "metric": f"{metric}_mean", "unit": unit, "median": round(mean, digits)}
            yield {**common, "metric": f"{metric}_worst", "unit": unit, "median": round(min(values), digits)}
        if self.chosen_calls:
            yield {**common, "metric": "int8_share", "unit": "1", "median": round(self.int8_share, 4)}


def _options(recipe: Any, scaling: Any, **options: Any) -> SageAttnProcessor:
    return SageAttnProcessor(recipe=recipe, scaling=scaling, min_tokens=MIN_TOKENS, **options)


def default_variants(recipe: str = "qk_int8_pv_bf16") -> tuple[Variant, ...]:
    """Return a variant for each scaling, and one of timestep scaling with the frozen table of a first run."""
    return (
        Variant("dynamic", _options(recipe, "dynamic")),
        Variant("timestep", _options(recipe, "timestep")),
        Variant("timestep_warm", _options(recipe, "timestep"), warm=True),
        Variant("per_block", _options(recipe, "per_block")),
        Variant("per_head", _options(recipe, "per_head")),
    )


def study_variants(recipe: str = "qk_int8_pv_bf16") -> tuple[Variant, ...]:
    """Return a variant for each repeatable rule that plans scales, and one with dynamic scales.

    "static" and "sigma_power" need a frozen table. "timestep_warm" is "timestep" with one.
    """

    def planned(name, scaling, *, warm=True, **options):
        return Variant(name, _options(recipe, scaling, **options), warm)

    return (
        planned("dynamic", "dynamic", warm=False),
        planned("timestep", "timestep", warm=False),
        planned("timestep_warm", "timestep"),
        planned("delayed", "delayed", warm=False),
        planned("static", "static"),
        planned("sigma_power", "sigma_power"),
        planned("sigma_ratio", {"name": "sigma_power", "gamma": 1.0}),
        planned("sigma_ratio_printed", {"name": "sigma_power", "gamma": -1.0}),
    )


def picture_arguments(pipe) -> dict:
    """Return call arguments for the picture size and text length that a pipeline was trained for.

    They are its VAE's and its tokenizer's. The defaults in a pipeline's code are those of its published checkpoint
    (FLUX: 512 text tokens), wrong for a small model.
    """
    accepted = inspect.signature(type(pipe).__call__).parameters
    arguments: dict[str, object] = {}
    pixels = getattr(getattr(getattr(pipe, "vae", None), "config", None), "sample_size", None)
    if isinstance(pixels, int) and {"height", "width"} <= accepted.keys():
        arguments |= {"height": pixels, "width": pixels}
    if "max_sequence_length" in accepted:
        tokenizers = [getattr(pipe, name, None) for name in ("tokenizer_3", "tokenizer_2", "tokenizer")]
        longest = next((t.model_max_length for t in tokenizers if t is not None), 0)
        default = accepted["max_sequence_length"].default
        if 0 < longest < default:
            arguments["max_sequence_length"] = longest
    return arguments


def generate(
    pipe, prompts: Sequence[str], seeds: Sequence[int], *, steps: int, on_step: Callable | None = None, **arguments
):
    """Draw one picture or clip per prompt and seed in one batch.

    Args:
        pipe: a text-to-image or text-to-video DiffusionPipeline.
        prompts, seeds: of equal length N. Noise is drawn on the CPU, so a seed gives the same noise on every device.
        steps: denoising steps. on_step: called without arguments after each.
        arguments: more for the pipeline's call; a text (negative_prompt) is repeated for every prompt.
    Returns: [N, 3, H, W] float32 in [0, 1] on the CPU, not rounded to 8 bits; of clips [N, T, 3, H, W].
    """
    if len(prompts) != len(seeds) or not prompts:
        raise ValueError(
            f"seeds: got {len(seeds)} for {len(prompts)} prompts, expected one per prompt and at least one"
        )

    def after_step(pipe, step, timestep, tensors):
        if on_step is not None:
            on_step()
        return tensors

    arguments = picture_arguments(pipe) | arguments
    drawn = pipe(
        prompt=list(prompts),
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        num_inference_steps=steps,
        output_type="pt",
        callback_on_step_end=after_step,
        **{k: [v] * len(prompts) if isinstance(v, str) else v for k, v in arguments.items()},
    )
    return (drawn.frames if hasattr(drawn, "frames") else drawn.images).float().cpu()


def compare(name: str, recipe: str, pictures: torch.Tensor, reference: torch.Tensor, calls=(0, 0), **more) -> Quality:
    """Return the distances of pictures [N, 3, H, W] or clips [N, T, 3, H, W] to reference ones.

    calls: int8_calls, fallback_calls, and chosen_calls. more: other fields of Quality.
    """
    measure = videos if pictures.dim() == 5 else metrics
    psnr_db = measure.psnr(pictures, reference).clamp(max=PSNR_CEILING)
    ssim = measure.ssim(pictures, reference)
    if pictures.dim() == 5:
        psnr_db, ssim = psnr_db.mean(1), ssim.mean(1)
    return Quality(name, recipe, tuple(psnr_db.tolist()), tuple(ssim.tolist()), *calls, **more)


def evaluate(
    pipe,
    prompts: Sequence[str],
    seeds: Sequence[int],
    variants: Sequence[Variant] | None = None,
    *,
    steps: int = 25,
    batch: int = 4,
    on_step: Callable | None = None,
    stock: torch.Tensor | None = None,
    on_handle: Callable | None = None,
    on_report: Callable | None = None,
    probe: bool = False,
    arguments: dict[str, Any] | None = None,
) -> dict[str, Quality]:
    """Run stock attention, then every variant, on the same prompts and seeds.

    Args:
        pipe: a text-to-image or text-to-video DiffusionPipeline with its own attention processors.
        prompts, seeds: of equal length. variants: default `default_variants()`. steps: denoising steps.
        batch: pictures per pipeline call; the last call may have fewer.
        on_step: called without arguments after each denoising step.
        stock: pictures of stock attention for these prompts and seeds, drawn earlier; None draws them.
        on_handle: called with the Handle of every variant before it draws.
        on_report: called with each Report whose calls are counted.
        probe: measure attention_sqnr_db too, with a Probe on every step, which replaces a probe that on_handle
            started. Pictures stay the same. Costs one read from the device per batch.
        arguments: more for the pipeline's call, e.g. `pipelines.call_arguments(name)`.
    Returns: {variant name: Quality}, distances to the stock pictures.
    Raises: ValueError for unequal lengths, batch < 1, or pictures with NaN.
    """
    from ..entry import apply

    if batch < 1:
        raise ValueError(f"batch: got {batch}, expected at least 1")
    variants = default_variants() if variants is None else variants

    batches = [slice(start, start + batch) for start in range(0, len(prompts), batch)]
    more = arguments or {}

    def draw(part):
        return generate(pipe, prompts[part], seeds[part], steps=steps, on_step=on_step, **more)

    stock = torch.cat([draw(part) for part in batches]) if stock is None else stock
    results = {}
    for variant in variants:
        pictures, calls, sqnr_db = [], [0, 0, 0], []
        with apply(pipe, variant.config) as handle:
            if on_handle is not None:
                on_handle(handle)
            if variant.warm:
                others = [WARM_UP_SEED + i for i in range(len(prompts[:batch]))]
                generate(pipe, prompts[:batch], others, steps=steps, on_step=on_step, **more)
                # if nothing ran in INT8 there is no table to freeze, and the results will say so
                if (
                    variant.config.scaling.name in FROM_TABLE
                    and variant.config.scaling.name != ADAPTIVE
                    and handle.has_learnt
                ):
                    handle.freeze_scales()
            # every step: with every k-th step only, the first one, which has no plan, would weigh k times as much
            watching = handle.probe(every=1) if probe else None
            for part in batches:
                if not variant.warm:
                    handle.reset()
                pictures.append(draw(part))
                if watching is not None:
                    sqnr_db += [min(row["sqnr_db"], PSNR_CEILING) for row in watching.summary()]
                    watching.reset()
                if not variant.warm or part is batches[-1]:  # a reset clears the counts, so read them before
                    report = handle.report()
                    if on_report is not None:
                        on_report(report)
                    chosen = sum(report.fallbacks.get(reason, 0) for reason in CHOSEN)
                    counted = (report.calls, sum(report.fallbacks.values()), chosen)
                    calls = [a + b for a, b in zip(calls, counted, strict=True)]
        found = {"calls": calls, "attention_sqnr_db": tuple(sqnr_db)}
        results[variant.name] = compare(variant.name, variant.config.recipe, torch.cat(pictures), stock, **found)
    return results


@contextmanager
def same_noise(pipe) -> Iterator[None]:
    """Have a pipeline draw its noise in fp32 and round it, so that its seeds mean the same in every dtype."""
    prepare_latents = pipe.prepare_latents

    def same(*args, **kwargs):
        # a generator's numbers in 16 bit are not its rounded fp32 numbers: draw in fp32 and round
        wanted = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        in_fp32 = [torch.float32 if isinstance(x, torch.dtype) else x for x in args]
        named = {k: torch.float32 if isinstance(x, torch.dtype) else x for k, x in kwargs.items()}
        drawn = prepare_latents(*in_fp32, **named)
        if not wanted:
            return drawn
        if isinstance(drawn, tuple):  # FLUX: the latents and their position ids
            return drawn[0].to(wanted[0]), *drawn[1:]
        return drawn.to(wanted[0])

    pipe.prepare_latents = same
    try:
        yield
    finally:
        del pipe.prepare_latents


@contextmanager
def in_float32(pipe) -> Iterator[None]:
    """Convert all models of a pipeline to fp32, and give them their own tensors back afterwards."""
    models = [model for model in pipe.components.values() if isinstance(model, torch.nn.Module)]
    tensors = [t for m in models for t in (*m.parameters(), *m.buffers()) if t.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.float()
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def floor(
    pipe, prompts, seeds, *, steps: int = 25, batch: int = 4, on_step: Callable | None = None,
    arguments: dict | None = None,
) -> Quality:  # fmt: skip
    """Compare stock pictures of a 16-bit pipeline with those of the same pipeline in fp32.

    This is the error of 16-bit rounding alone.

    Args: as `evaluate`. pipe must be fp16 or bf16. Its tensors are fp32 meanwhile, and the original ones afterwards.
    Returns: Quality named "stock_fp16" or "stock_bf16".
    Raises: ValueError for a pipeline that is not 16 bit.
    """
    if pipe.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"pipe: got {pipe.dtype}, expected float16 or bfloat16; an fp32 pipeline is its own floor")
    name = "stock_fp16" if pipe.dtype == torch.float16 else "stock_bf16"

    def draw():
        parts = (slice(start, start + batch) for start in range(0, len(prompts), batch))
        more = {"steps": steps, "on_step": on_step, **(arguments or {})}
        return torch.cat([generate(pipe, prompts[p], seeds[p], **more) for p in parts])

    with same_noise(pipe):
        half = draw()
        with in_float32(pipe):
            full = draw()
    return compare(name, "", half, full)


def decibels(psnr_db: float, digits: int = 1) -> str:
    """Return a PSNR in words, and of PSNR_CEILING that it is one."""
    if psnr_db < PSNR_CEILING:
        return f"{psnr_db:.{digits}f} dB"
    return f"{PSNR_CEILING:.0f} dB (identical, the most there is)"


def in_words(result: Quality) -> str:
    """Describe a comparison in one line: its means and its worst picture."""
    if not result.is_ours:
        return f"{NOTHING_RAN}: both pictures are stock"
    count = len(result.psnr_db)
    mean_psnr, mean_ssim = sum(result.psnr_db) / count, sum(result.ssim) / count
    mean, worst = (decibels(psnr, 2) for psnr in (mean_psnr, min(result.psnr_db)))
    return f"PSNR {mean}, SSIM {mean_ssim:.5f} (means), worst PSNR {worst}"


def append_results(path: str | Path, pipeline: str, results: Sequence[Quality], *, device: str) -> None:
    """Append every result to results.csv, as cases of `pipeline`.

    device: where it ran. "cpu" is written as the gpu column even if the machine has a GPU.
    Raises: ValueError, before anything is written, for a result without a call in INT8.
    """
    from sage_kernels.results import append_row

    where = {"gpu": "cpu"} if torch.device(device).type == "cpu" else {}
    for row in [row for result in results for row in result.rows(pipeline)]:
        append_row(path, **row, **where)
