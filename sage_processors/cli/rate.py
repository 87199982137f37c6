"""The commands `time` and `rate`: how fast a checkpoint is on this machine, and how near to stock."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from .. import pipelines
from ..option_groups import IN_16_BIT, LINEARS
from ..options import SageAttnProcessor
from ..presets import heading
from . import loading
from .checks import check_csv, check_folder, check_names, float32_settings_kept, folder_named, refusing
from .kinds import DRAWN, EMBEDDING, TEXT, Looked, check_options, fitting, look_at
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


MOST_PIXELS, MOST_TOKENS = 2**14, 2**20  # far beyond any model
LEAST_RATED = 16  # pixels: SSIM's window, as a size that pipelines draw
PresetOption = Annotated[
    str, typer.Option(help="The preset, such as fast; none: INT8 attention alone, of texts with its cache.")
]
OwnRecipeOption = Annotated[
    str | None,
    typer.Option(
        help=f"Number formats of attention in place of the preset's: {RECIPES}, {IN_16_BIT}; or mixed, of pipelines."
    ),
]
LinearsOption = Annotated[
    str | None, typer.Option(help=f"Linear layers in place of the preset's: {', '.join(LINEARS)}.")
]
PolicyOption = Annotated[Path | None, typer.Option(help="A policy file of `calibrate` in place of the preset.")]
StepsOption = Annotated[int | None, typer.Option(min=1, help="Denoising steps. Default: the pipeline's own.")]
HeightOption = Annotated[
    int | None, typer.Option(min=8, max=MOST_PIXELS, help="Height in pixels. Default: what it was trained for.")
]
WidthOption = Annotated[int | None, typer.Option(min=8, max=MOST_PIXELS, help="Width in pixels.")]
FramesOption = Annotated[int | None, typer.Option(min=1, max=10_000, help="Frames of a clip.")]


@float32_settings_kept()
def time_model(
    ctx: typer.Context,
    model: ModelArgument,
    steps: StepsOption = None,
    height: HeightOption = None,
    width: WidthOption = None,
    frames: FramesOption = None,
    timed: Annotated[
        int, typer.Option(min=1, max=1000, help="Steps that are measured; a picture's or clip's time is computed.")
    ] = 4,
    full: Annotated[bool, typer.Option("--full", help="Draw with all steps. Texts are always written whole.")] = False,
    random: Annotated[
        bool,
        typer.Option("--random", help="Random weights of the true shapes: reads configs and tokenizers, no weights."),
    ] = False,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=2, max=MOST_TOKENS, help="Tokens that a text model reads. Default: 1024, or what it can."),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="New tokens of a language model.")] = 128,
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

    config = _config(ctx, model, preset, recipe, linears, policy)
    looked = look_at(model)
    check_options(ctx, looked, config)
    kind, more = looked.kind, timing.FEW + timed
    if kind in DRAWN:
        steps, arguments = steps or looked.steps, _size(looked, height, width, frames)
        title, tokens = f"{steps} steps", 0
    else:
        steps = new_tokens if kind == TEXT else 1
        option = "--new-tokens" if prompt_tokens is None else "--prompt-tokens"
        tokens = fitting(looked, option, prompt_tokens, 1024, max(new_tokens, more) if kind == TEXT else 0)
        title = f"{steps} tokens after {tokens}" if kind == TEXT else f"a text of {tokens} tokens"
    target = _loaded(looked, device, dtype, random)
    _check_size(target, height, width)
    size: dict[str, int] = {}
    with answer(as_json) as found, console.status("stock") as status:
        if kind in DRAWN:
            call = timing.picture_call(target, example_prompts(1, model)[0], arguments, size)
        else:
            call = (timing.text_call if kind == TEXT else timing.embedding_call)(target, tokens)
        times, calls = timing.time_both(
            target, call, config, steps=steps, more=more, whole=full or kind == TEXT,
            on_way=lambda way: status.update(f"timing {way}"),
        )  # fmt: skip
        what = kind if kind in DRAWN else TEXT
        said = timing.verdict(times, calls, target.device, what)
        found |= {"model": model, "steps": steps, "options": repr(config), "verdict": said}
        precision, where = str(target.dtype).removeprefix("torch."), timing.device_name(target.device)
        note = _other_size({"height": height, "width": width, "frames": frames}, size)
        found |= dict.fromkeys(("height", "width", "frames")) | size
        found |= {"prompt_tokens": tokens or None, "dtype": precision, "random": random, "note": note}
        parts = [title, *(f"{name} {number}" for name, number in size.items()), f"{precision} on {where}"]
        title = ", ".join(parts + ["random weights"] * random)
        found |= calls._asdict() | {
            "device": str(target.device),
            "gpu": where if target.device.type == "cuda" else "",
            "times": {way: time._asdict() for way, time in times.items()},
        }
        table = Table("run with", title=f"{model}: {title}", title_justify="left")
        for name in (f"s a {what}", "a step, s", "all else, s", "first call, s more", "peak memory, GiB"):
            table.add_column(name, justify="right")
        for way, time in times.items():
            table.add_row(way, *("–" if x is None else f"{x:.3f}" for x in time))
        for line in filter(None, (_heading(config, model, policy), note)):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        console.print(table)
        console.print(said, soft_wrap=True, highlight=False, markup=False)


@float32_settings_kept()
def rate(
    ctx: typer.Context,
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
    windows: Annotated[int, typer.Option(min=1, help="Pieces of held-out text, for a text model.")] = 64,
    context: Annotated[
        int | None,
        typer.Option(min=4, max=MOST_TOKENS, help="Tokens in a piece. Default: 512, or what the model can."),
    ] = None,
    new_tokens: Annotated[
        int,
        typer.Option(min=1, max=MOST_TOKENS, help="New tokens after a piece's first quarter, of a language model."),
    ] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Dialogues in the model's own chat template.")] = False,
    output: Annotated[
        Path,
        typer.Option(
            help="A folder for the page and its data. A later call goes on from it.",
            parser=folder_named,
            metavar="FOLDER",
        ),
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

    The noise floor is stock with another exact kernel. Differences are paired, with 95 % intervals.
    """
    from ..evaluation.protocol import kept, rating, rating_language, rating_page
    from ..evaluation.protocol.prompts import PROMPTS, built_in, from_file

    check_names("--reference", [reference], rating.REFERENCES)
    check_names("--category", category or (), PROMPTS)
    if prompts and category:
        raise typer.BadParameter(
            "got it beside --prompts, whose file has no categories: leave one out", param_hint="--category"
        )
    check_csv(csv)
    check_folder(output, "--output", ("rating.json", "index.html"), ("pictures",))
    config = _config(ctx, model, preset, recipe, linears, policy)
    config = replace(config, linears=replace(config.linears, drop_weights=False))  # later batches of stock need them
    with answer(as_json) as found, _resumable(output):
        looked = look_at(model)
        check_options(ctx, looked, config)
        bar = functools.partial(steps_bar, Path(model).name)
        if looked.kind in DRAWN:
            pairs = _pairs(model, prompts and from_file(prompts), images, category, built_in)
            seeds, arguments = [seed + i for i in range(len(pairs))], _size(looked, height, width, frames)
            for option, given in (("--height", height), ("--width", width)):
                if given is not None and given < LEAST_RATED:
                    raise typer.BadParameter(
                        f"got {given}, expected at least {LEAST_RATED}: smaller pictures have no SSIM",
                        param_hint=option,
                    )
            scores = _clip_score(clip, device)
            pipe = _loaded(looked, device, dtype)
            _check_size(pipe, height, width)
            state = rating.rate(
                pipe, pairs, seeds, config, output, name=model, steps=steps or looked.steps, batch=batch,
                reference=reference, clip=scores, arguments=arguments, progress=bar,
            )  # fmt: skip
        else:
            pieces, config = _pieces(looked, config, windows, context, new_tokens, chat)
            state = rating_language.rate_texts(
                _loaded(looked, device, dtype), pieces, config, output, name=model, writes=looked.kind == TEXT,
                chat=chat, new_tokens=new_tokens, batch=batch, progress=functools.partial(bar, unit="batches"),
            )  # fmt: skip
        name = Path(model).name
        if csv is not None and str(csv.resolve()) not in state.get("csv", ()) and state["summary"]["int8_calls"]:
            if looked.kind == TEXT:
                shape = looked.skeleton.config.get_text_config()
                rating_language.append_rows(csv, name + "_chat" * chat, state, shape, config.recipe)
            else:
                rating.append_rows(csv, name, state, config.recipe)
            state["csv"] = [*state.get("csv", ()), str(csv.resolve())]
            kept.write_state(state, output)
        page = output / "index.html"
        rating_page.write_page(state, page)
        found |= {"page": str(page.resolve()), "verdict": state["verdict"], **state["summary"]}
        for note in state["notes"]:
            console.print(note, style="yellow", soft_wrap=True, markup=False)
        console.print(state["verdict"], soft_wrap=True, highlight=False, markup=False)
        console.print(f"Page: {page.resolve()}", soft_wrap=True, highlight=False, markup=False)
        if not rating.ran(state["summary"]).ran:
            fail("nothing was rated")


@contextmanager
def _resumable(output: Path) -> Iterator[None]:
    """End an interrupted rating with one line that says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"Interrupted: the same command goes on with what {output} has.", err=True)
        raise typer.Exit(130) from None


def _config(ctx, model, preset, recipe, linears, policy) -> SageAttnProcessor:
    """Return the options to measure: a policy's, or a preset's with what is given in its place."""
    from ..evaluation.quality import MIN_TOKENS

    given: dict[str, Any] = {"recipe": recipe, "linears": linears}
    given = {name: value for name, value in given.items() if value is not None}
    if _is_embedded(model):
        given["min_tokens"] = MIN_TOKENS  # so small a model is short on every GPU
    try:
        if policy is not None:
            if recipe or linears or ctx.get_parameter_source("preset").name != "DEFAULT":
                raise ValueError("it has options of its own; leave out --preset, --recipe and --linears")
            return SageAttnProcessor.from_policy(policy)
        return SageAttnProcessor(**given) if preset == "none" else SageAttnProcessor(preset, **given)
    except (OSError, ValueError) as error:
        said = str(error).removeprefix("path: ")
        raise typer.BadParameter(said, param_hint=None if policy is None else "--policy") from error


def _is_embedded(model: str) -> bool:
    return model in (*pipelines.PIPELINES, *pipelines.VIDEOS)


def _heading(config: SageAttnProcessor, model: str, policy: Path | None) -> str:
    """Return the first line of `time`: the preset, options that differ, and the limit chosen by `_config`."""
    if policy is not None or not _is_embedded(model):
        return heading(config)
    asked = heading(replace(config, min_tokens=None)) or "No preset"
    return f"{asked}; min_tokens={config.min_tokens}, so that so small a model runs in INT8 at all"


def _other_size(asked: dict[str, int | None], size: dict[str, int]) -> str:
    """Return the sizes that the pipeline rounded, in words, or "". size: as drawn."""
    other = [f"{name} {drawn}, not {asked[name]}" for name, drawn in size.items() if asked[name] not in (None, drawn)]
    return f"The pipeline rounds sizes: it draws {', '.join(other)}." if other else ""


def _pieces(looked: Looked, config, windows, context, new_tokens, chat) -> tuple[Any, SageAttnProcessor]:
    """Return windows of held-out text, and options with which short texts run in INT8, too."""
    from ..evaluation import language

    length = fitting(looked, "--context", context, 512)
    if looked.kind == TEXT:
        fitting(looked, "--new-tokens", max(length // 4, 2), 0, new_tokens)
    with refusing(looked.name):
        tokenizer = language.load_tokenizer(looked.name)
    try:
        pieces = language.heldout_windows(tokenizer, length, count=windows, chat=chat)
    except ValueError as error:
        argument, _, said = str(error).partition(": ")
        options = {"count": "--windows", "length": "--context", "chat": "--chat"}
        raise typer.BadParameter(said or argument, param_hint=options.get(argument)) from error
    return pieces, replace(config, min_tokens=language.ONE_TOKEN)


def _clip_score(name: str | None, device: str) -> Any:
    """Return the score of a CLIP model; None without a name."""
    from ..evaluation.protocol.scores import ClipScore

    if name is None:
        return None
    try:
        return ClipScore(name, torch_device(device))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(
            f"{name}: expected a folder with a CLIP model, or a name in the Hub's local cache: nothing is downloaded",
            param_hint="--clip",
        ) from error


def _loaded(looked: Looked, device: str, dtype: str | None, random: bool = False) -> Any:
    """Return a pipeline, or a transformers model, on the device. random: weights are random."""
    import torch

    from ..evaluation import language
    from .random_weights import random_pipeline

    if looked.skeleton is None and not random:
        return loading.load_pipeline(looked.name, device, dtype)
    where = torch_device(device)
    check_names("--dtype", [dtype] if dtype else (), DTYPES)
    chosen = getattr(torch, dtype) if dtype else own_dtype(where)
    if looked.skeleton is None:
        return random_pipeline(looked.name, where, chosen)
    with refusing(looked.name):
        if random:
            with torch.device(where):
                return type(looked.skeleton)(looked.skeleton.config).to(chosen).eval()
        encoder = looked.kind == EMBEDDING
        return language.load(looked.name, device=where, dtype=chosen, encoder=encoder)[0]


def _size(looked: Looked, height: int | None, width: int | None, frames: int | None) -> dict[str, Any]:
    given = {"height": height, "width": width, "num_frames": frames}
    own = pipelines.call_arguments(looked.name)
    return own | {name: value for name, value in given.items() if value is not None}


def _check_size(target: Any, height: int | None, width: int | None) -> None:
    """Raise typer.BadParameter for a size that a pipeline such as FLUX's would round down to nothing."""
    processor = getattr(getattr(target, "image_processor", None), "config", {})
    least = processor.get("vae_scale_factor", 1)
    for option, given in (("--height", height), ("--width", width)):
        if given is not None and given < least:
            raise typer.BadParameter(
                f"got {given}, expected at least {least}: this pipeline draws multiples of it", param_hint=option
            )


def _pairs(model, from_file, count, category, built_in) -> list[tuple[str, str]]:
    if from_file:
        if count is not None and count > len(from_file):
            raise typer.BadParameter(
                f"got {count}, expected at most {len(from_file)}, the prompts in the file of --prompts",
                param_hint="--images",
            )
        return list(from_file[:count])
    count = count or 32
    if _is_embedded(model):  # which know a few words
        return [("", prompt) for prompt in example_prompts(count, model)]
    return list(built_in(count, category))
