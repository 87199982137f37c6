"""The kind of a model, and the options of `time` and `rate` that mean something for it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..option_groups import IN_16_BIT
from ..options import SageAttnProcessor
from ..unsupported import UnsupportedAttentionError
from . import loading
from .checks import check_names, refusing


PICTURE, CLIP, TEXT, EMBEDDING = "picture", "clip", "text", "embedding"  # what a model makes
MODELS = {
    PICTURE: "a pipeline of pictures", CLIP: "a pipeline of clips", TEXT: "a language model",
    EMBEDDING: "a sentence encoder",
}  # fmt: skip
OF_SCHEDULER = "the steps that its scheduler was trained with"
DRAWN, READS = (PICTURE, CLIP), (TEXT, EMBEDDING)
# option → the kinds that it means something for; all kinds take the others
KINDS = {
    **dict.fromkeys(("steps", "height", "width", "prompts", "category", "images", "seed"), DRAWN),
    **dict.fromkeys(("reference", "clip", "policy"), DRAWN),
    "frames": (CLIP,),
    **dict.fromkeys(("prompt_tokens", "windows", "context"), READS),
    **dict.fromkeys(("new_tokens", "chat"), (TEXT,)),
    **dict.fromkeys(("full", "csv"), (*DRAWN, TEXT)),
}


@dataclass(frozen=True)
class Looked:
    """A model that was looked at without its weights.

    Attributes: kind. skeleton: a transformers model without weights, None for a pipeline. steps: a pipeline's own
        number of steps. most_steps: those that its scheduler was trained with, if it says so. most_frames: those that
        its denoiser knows positions for, if it says so.
    """

    name: str
    kind: str
    skeleton: Any = None
    steps: int = 0
    most_steps: int | None = None
    most_frames: int | None = None

    @property
    def room(self) -> int | None:
        """Most tokens of a text model; None without a limit."""
        from ..evaluation.language import positions

        return positions(self.skeleton)


def look_at(name: str) -> Looked:
    """Look at a model's configs. Raises: typer.BadParameter for one that can't be timed or rated."""
    skeleton = loading.load_language_skeleton(name)
    if skeleton is None:
        return _pipeline(name)
    config, kind, writes = skeleton.config, type(skeleton).__name__, skeleton.can_generate()
    reads_text = skeleton.main_input_name == "input_ids" and (writes or config.get_text_config() is config)
    if config.is_encoder_decoder or not reads_text:
        raise typer.BadParameter(
            f"{name} is a {kind}, expected a pipeline of diffusers, a language model or a sentence encoder; `report` "
            "lists the layers of any model",
            param_hint="MODEL",
        )
    from ..language.choice import refuse_without_attention

    try:
        refuse_without_attention(skeleton, "sage_int8")
    except UnsupportedAttentionError as error:
        raise typer.BadParameter(
            f"{name} is a {kind}, none of whose layers takes an attention implementation: nothing can run in INT8",
            param_hint="MODEL",
        ) from error
    return Looked(name, TEXT if writes else EMBEDDING, skeleton)


def _pipeline(name: str) -> Looked:
    diffusers = loading.quiet_diffusers()
    source = loading.locate(name, with_texts=True)
    with refusing(name, "MODEL"):
        if Path(source).is_dir() and not (Path(source) / "model_index.json").is_file():
            made = loading.read_object(Path(source) / "config.json").get("_class_name")
            if made is None:
                raise ValueError("its config.json has no model_type, as of transformers, and no _class_name")
            raise typer.BadParameter(
                f"{name} holds a {made} alone, expected a whole pipeline, a folder with a model_index.json",
                param_hint="MODEL",
            )
        if Path(source).is_dir():
            loading.read_object(Path(source) / "model_index.json")
        index = diffusers.DiffusionPipeline.load_config(source)
        if "_class_name" not in index:
            raise ValueError("its model_index.json has no _class_name, as pipelines of diffusers have")
        made = getattr(diffusers, index["_class_name"])
        known = inspect.signature(made.__call__).parameters
        wanted = {key for key, value in known.items() if value.default is value.empty} - {"self", "prompt", "kwargs"}
        if wanted or not {"prompt", "num_inference_steps"} <= known.keys():
            raise typer.BadParameter(
                f"{name} is a {index['_class_name']}, expected a pipeline that draws from a prompt alone",
                param_hint="MODEL",
            )
        parts = inspect.signature(made.__init__).parameters.values()
        lacking = [x.name for x in parts if x.default is x.empty and x.name not in {"self", "kwargs", *index}]
        if lacking:
            raise ValueError(f"its model_index.json lacks {', '.join(lacking)} of a {index['_class_name']}")
        config = _config_of(diffusers, index, source, "scheduler")
        positions = _config_of(diffusers, index, source, "transformer").get("rope_max_seq_len")
        a_position = _config_of(diffusers, index, source, "vae").get("scale_factor_temporal")
    kind = CLIP if "num_frames" in known else PICTURE
    own: Any = known["num_inference_steps"].default
    most_frames = (positions - 1) * a_position + 1 if kind == CLIP and positions and a_position else None
    return Looked(name, kind, None, own, config.get("num_train_timesteps"), most_frames)


def _config_of(diffusers: Any, index: dict[str, Any], source: str, part: str) -> dict[str, Any]:
    """Return the config of a pipeline's part; {} if it has none."""
    kind = getattr(diffusers, (index.get(part) or [None, ""])[1] or "", None)
    found: dict[str, Any] = {} if kind is None else kind.load_config(source, subfolder=part)
    return found


def check_options(context: typer.Context, looked: Looked, config: SageAttnProcessor) -> None:
    """Raise typer.BadParameter for an option that was given but means nothing for this kind of model."""
    for name, kinds in KINDS.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT" and looked.kind not in kinds:
            raise typer.BadParameter(
                f"{looked.name} is {MODELS[looked.kind]}, which has no such option; it is for "
                f"{' or '.join(MODELS[kind] for kind in kinds)}",
                param_hint=f"--{name.replace('_', '-')}",
            )
    if looked.kind in READS:
        check_names("--recipe", [config.recipe], [*loading.RECIPES.split(", "), IN_16_BIT])
    if looked.kind != TEXT and context.params.get("recipe") == IN_16_BIT:  # a language model's cache is in 8 bit
        _refuse_all_in_16_bit(looked, config)
    _check_most("--steps", context.params.get("steps"), looked.most_steps, OF_SCHEDULER)
    why = "those that its denoiser knows positions for"
    _check_most("--frames", context.params.get("frames"), looked.most_frames, why)


def check_steps(name: str, steps: int) -> None:
    """Raise typer.BadParameter for more steps than a pipeline's scheduler knows. Reads configs alone."""
    diffusers, source = loading.quiet_diffusers(), loading.locate(name)
    with refusing(name):
        index = diffusers.DiffusionPipeline.load_config(source)
        most = _config_of(diffusers, index, source, "scheduler").get("num_train_timesteps")
    _check_most("--steps", steps, most, OF_SCHEDULER)


def _check_most(option: str, given: int | None, most: int | None, why: str) -> None:
    if given is not None and most is not None and given > most:
        raise typer.BadParameter(f"got {given}, expected at most {most}, {why}", param_hint=option)


def _refuse_all_in_16_bit(looked: Looked, config: SageAttnProcessor) -> None:
    """Raise typer.BadParameter if no linear layer of a model would run in 8 bit."""
    from ..diffusion.host.discovery import denoisers
    from ..linears.weights.layers import choose

    parts = denoisers(loading.load_skeleton(looked.name)).values() if looked.kind in DRAWN else [looked.skeleton]
    own = config.linears
    given: dict[str, Any] = {"min_features": own.min_features, "drop_weights": own.drop_weights}
    if all(layer.format == "none" for part in parts for layer in choose(part, label=str, linears=own.format, **given)):
        raise typer.BadParameter(
            f"got {IN_16_BIT}, with which nothing of {looked.name} runs in 8 bit, as its linear layers are in 16 bit, "
            f"too; expected one of {loading.RECIPES}",
            param_hint="--recipe",
        )


def fitting(looked: Looked, option: str, given: int | None, usual: int, more: int = 0) -> int:
    """Return the number of tokens of a text.

    Args: given: by the user; None: as many of the `usual` ones as the model has room for. more: tokens on top.
    Raises: typer.BadParameter if they don't fit.
    """
    room = looked.room
    tokens = given if given is not None else usual if room is None else max(min(usual, room - more), 2)
    if room is not None and tokens + more > room:
        raise typer.BadParameter(
            f"got {tokens} tokens{f' and {more} new ones' if more else ''}, expected at most {room} together, the "
            f"positions that {looked.name} knows",
            param_hint=option,
        )
    return tokens
