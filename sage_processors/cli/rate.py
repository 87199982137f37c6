"""The commands `time` and `rate`: how fast a checkpoint is on this machine, and how near to stock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import pipelines
from ..option_groups import LINEARS
from ..options import SageAttnProcessor
from . import loading
from .checks import check_csv, check_names, float32_settings_kept, refusing
from .loading import (
    DTYPES,
    MOST_IMAGES,
    RECIPES,
    BatchOption,
    CsvOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelArgument,
    SeedOption,
    answer,
    console,
    example_prompts,
    fail,
    own_dtype,
    steps_bar,
    torch_device,
)


PresetOption = Annotated[str, typer.Option(help="The preset to run, such as fast; none: INT8 attention alone.")]
OwnRecipeOption = Annotated[
    str | None, typer.Option(help=f"Number formats of attention in place of the preset's: {RECIPES}, mixed.")
]
LinearsOption = Annotated[
    str | None, typer.Option(help=f"Linear layers in place of the preset's: {', '.join(LINEARS)}.")
]
PolicyOption = Annotated[Path | None, typer.Option(help="A policy file of `calibrate` in place of the preset.")]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Denoising steps. Default: the pipeline's own.")]
HeightOption = Annotated[int | None, typer.Option(min=8, help="Height in pixels. Default: what it was trained for.")]
WidthOption = Annotated[int | None, typer.Option(min=8, help="Width in pixels.")]
FramesOption = Annotated[int | None, typer.Option(min=1, help="Frames of a clip.")]


@float32_settings_kept()
def time_model(
    model: ModelArgument,
    steps: StepsOption = None,
    height: HeightOption = None,
    width: WidthOption = None,
    frames: FramesOption = None,
    timed: Annotated[int, typer.Option(min=1, help="Steps whose time is measured; a picture's is computed.")] = 4,
    full: Annotated[bool, typer.Option("--full", help="Draw whole pictures with all steps.")] = False,
    random: Annotated[
        bool, typer.Option("--random", help="Random weights of the true shapes: reads configs, no weights.")
    ] = False,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a language model's prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of a language model.")] = 128,
    preset: PresetOption = "fast",
    recipe: OwnRecipeOption = None,
    linears: LinearsOption = None,
    policy: PolicyOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time a picture, clip or text in INT8 and with stock: seconds, memory, and a yes or no for this GPU."""
    from ..evaluation.protocol import timing

    config = _config(model, preset, recipe, linears, policy)
    language_model, _ = _language_model(model, device, dtype, random)
    kind = "text"
    options: dict[str, Any] = {"more": timing.FEW + timed, "whole": full}
    _refuse_for_language(language_model, linears, policy)
    with answer(as_json) as found, console.status("stock") as status:
        options["on_way"] = lambda way: status.update(f"timing {way}")
        if language_model is not None:
            where, steps = language_model.device, new_tokens
            lengths: dict[str, Any] = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
            times, calls = timing.time_language(language_model, recipe=config.recipe, **lengths, **options)
        else:
            pipe = _pipeline(model, device, dtype, random)
            where, steps, arguments = pipe.device, steps or _own_steps(pipe), _size(model, height, width, frames)
            kind = "clip" if hasattr(pipe, "video_processor") else "picture"
            prompt = example_prompts(1, model)[0]
            times, calls = timing.time_pipeline(pipe, prompt, config, steps=steps, arguments=arguments, **options)
        said = timing.verdict(times, calls, where, kind)
        ran = repr(config) if language_model is None else f"recipe={config.recipe!r}, INT8 cache"
        found |= {"model": model, "steps": steps, "options": ran, "int8_calls": calls, "verdict": said}
        found |= {"device": str(where), "times": {way: time._asdict() for way, time in times.items()}}
        names = (f"s a {kind}", "a step, s", "all else, s", "first call, s more", "peak memory, GiB")
        table = Table(
            "run with", title=f"{model}: {steps} {'tokens' if kind == 'text' else 'steps'}", title_justify="left"
        )
        for name in names:
            table.add_column(name, justify="right")
        for way, time in times.items():
            table.add_row(way, *("–" if x is None else f"{x:.3f}" for x in time))
        console.print(table)
        console.print(said, soft_wrap=True, highlight=False, markup=False)


@float32_settings_kept()
def rate(
    model: ModelArgument,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file, one prompt a line. Default: built-in ones.")
    ] = None,
    category: Annotated[list[str] | None, typer.Option(help="A category of the built-in prompts. Repeatable.")] = None,
    images: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_IMAGES, help="The number of pictures. Default: 32, or all of --prompts."),
    ] = None,
    seed: SeedOption = 1000,
    steps: StepsOption = None,
    batch: BatchOption = 4,
    height: HeightOption = None,
    width: WidthOption = None,
    frames: FramesOption = None,
    reference: Annotated[str, typer.Option(help="Compare with stock, or with float32: the model in fp32.")] = "stock",
    clip: Annotated[
        str | None, typer.Option(help="A CLIP model on the disk, for its score: a folder or a name.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Pieces of held-out text, for a language model.")] = 64,
    context: Annotated[int, typer.Option(min=4, help="Tokens in a piece of text.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="New tokens after a prompt of a language model.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Dialogues in the model's own chat template.")] = False,
    output: Annotated[
        Path, typer.Option(help="A folder for the page and its data. A later call goes on from it.")
    ] = Path("sage_rating"),
    preset: PresetOption = "fast",
    recipe: OwnRecipeOption = None,
    linears: LinearsOption = None,
    policy: PolicyOption = None,
    csv: CsvOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rate a checkpoint's pictures, clips or texts in INT8 beside stock: a page, its data, and a verdict.

    The noise floor is stock with another exact kernel. Differences are paired by seed, with 95 % intervals.
    """
    from ..evaluation import language
    from ..evaluation.held_out_text import heldout_windows
    from ..evaluation.protocol import rating, rating_page
    from ..evaluation.protocol.prompts import PROMPTS, built_in, from_file

    check_names("--reference", [reference], rating.REFERENCES)
    check_names("--category", category or (), PROMPTS)
    check_csv(csv)
    if not output.parent.is_dir() or output.is_file():
        raise typer.BadParameter(f"{output}: expected a folder, new or of an earlier rating", param_hint="--output")
    config = _config(model, preset, recipe, linears, policy)
    loaded, tokenizer = _language_model(model, device, dtype, random=False)
    _refuse_for_language(loaded, linears, policy)
    pipe: Any = _pipeline(model, device, dtype, random=False) if loaded is None else None
    with answer(as_json) as found:
        if loaded is not None:
            from ..evaluation.protocol.rating_language import rate_language, settings_of

            texts = heldout_windows(tokenizer, context, count=windows, chat=chat)
            starts = heldout_windows(tokenizer, max(context // 4, 2), count=min(windows, 16), chat=chat)
            rating.started(output, settings_of(loaded, texts, model, config.recipe))
            with console.status("stock, fp32, another exact kernel, INT8, INT8 with an INT8 cache"):
                state, results = rate_language(
                    loaded, texts, starts, name=model, new_tokens=new_tokens, recipe=config.recipe, batch=batch
                )
            rating.write_state(state, output)
            if csv is not None:
                language.append_results(csv, Path(model).name + "_chat" * chat, results, loaded, context)
        else:
            pairs = _pairs(model, prompts and from_file(prompts, images), images or 32, category, built_in)
            seeds, steps = [seed + i for i in range(len(pairs))], steps or _own_steps(pipe)
            ways = 4 if reference == "float32" and pipe.dtype != own_dtype(torch_device("cpu")) else 3
            with steps_bar(Path(model).name, steps * ways * -(-len(pairs) // batch)) as tick:
                state = rating.rate(
                    pipe, pairs, seeds, config, output, name=model, steps=steps, batch=batch, reference=reference,
                    clip=clip, arguments=_size(model, height, width, frames), on_step=tick,
                )  # fmt: skip
            if csv is not None and state["summary"]["int8_calls"]:
                rating.append_rows(csv, Path(model).name, state, config.recipe)
        page = output / "index.html"
        rating_page.write_page(state, page)
        found |= {"page": str(page.resolve()), "verdict": state["verdict"], **state["summary"]}
        for note in state["notes"]:
            console.print(note, style="yellow", soft_wrap=True, markup=False)
        console.print(state["verdict"], soft_wrap=True, highlight=False, markup=False)
        console.print(f"Page: {page.resolve()}", soft_wrap=True, highlight=False, markup=False)
        if not state["summary"]["int8_calls"]:
            fail("nothing was rated")


def _config(model, preset, recipe, linears, policy) -> SageAttnProcessor:
    """Return the options to measure: a policy's, or a preset's with what is given in its place."""
    from ..evaluation.quality import MIN_TOKENS

    given: dict[str, Any] = {"recipe": recipe, "linears": linears}
    given = {name: value for name, value in given.items() if value is not None}
    if model in (*pipelines.PIPELINES, *pipelines.VIDEOS):
        given["min_tokens"] = MIN_TOKENS  # so small a model is short on every GPU
    try:
        if policy is not None:
            if recipe or linears:
                raise ValueError("--policy: has options of its own; leave out --recipe and --linears")
            return SageAttnProcessor.from_policy(policy)
        return SageAttnProcessor(**given) if preset == "none" else SageAttnProcessor(preset, **given)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _language_model(model: str, device: str, dtype: str | None, random: bool) -> tuple[Any, Any]:
    """Return a transformers model on the device and its tokenizer.

    Two Nones if the name is of something else. random: weights are random, and the tokenizer is None.
    """
    import torch

    from ..evaluation import language

    skeleton = loading.load_language_skeleton(model)
    if skeleton is None:
        return None, None
    where = torch_device(device)
    check_names("--dtype", [dtype] if dtype else (), DTYPES)
    chosen = getattr(torch, dtype) if dtype else own_dtype(where)
    with refusing(model):
        if random:
            with torch.device(where):
                return type(skeleton)(skeleton.config).to(chosen).eval(), None
        return language.load(model, device=where, dtype=chosen)


def _refuse_for_language(model: Any, linears: str | None, policy: Path | None) -> None:
    """Refuse options that a language model's measurement would not run. model: None for a pipeline."""
    name = "--linears" if linears else "--policy" if policy else None
    if model is not None and name:
        raise typer.BadParameter(
            "got it for a language model, of which INT8 attention and cache alone are measured; leave it out",
            param_hint=name,
        )


def _pipeline(model: str, device: str, dtype: str | None, random: bool) -> Any:
    if not random:
        return loading.load_pipeline(model, device, dtype)
    import torch

    from .random_weights import random_pipeline

    where = torch_device(device)
    check_names("--dtype", [dtype] if dtype else (), DTYPES)
    return random_pipeline(model, where, getattr(torch, dtype) if dtype else own_dtype(where))


def _own_steps(pipe: Any) -> int:
    import inspect

    steps: int = inspect.signature(type(pipe).__call__).parameters["num_inference_steps"].default
    return steps


def _size(model: str, height: int | None, width: int | None, frames: int | None) -> dict[str, Any]:
    given = {"height": height, "width": width, "num_frames": frames}
    return pipelines.call_arguments(model) | {name: value for name, value in given.items() if value is not None}


def _pairs(model, from_file, count, category, built_in) -> list[tuple[str, str]]:
    if from_file:
        return list(from_file)
    if model in (*pipelines.PIPELINES, *pipelines.VIDEOS):  # which know a few words
        return [("", prompt) for prompt in example_prompts(count, model)]
    return list(built_in(count, category))
