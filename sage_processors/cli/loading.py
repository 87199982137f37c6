"""Shared code of the commands: options, JSON output, prompts, loading of models, and messages.

The files of the commands import torch and what needs it when a command runs, so that --help answers at once.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import pipelines
from ..files.strict_json import plain_data
from ..installation import pip_install
from ..option_groups import IN_16_BIT, SCALINGS, RecipeName
from .checks import refusing


if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")
# a file or a pipe has no width, and tables of measurements have many columns
console = Console(width=None if sys.stdout.isatty() else 160)

RECIPES = ", ".join(name for name in get_args(RecipeName) if name not in ("mixed", IN_16_BIT))
PipelineArgument = Annotated[
    str, typer.Argument(help="An embedded pipeline (tiny_sd, tiny_flux, tiny_wan), a folder, or a name on the Hub.")
]
ModelArgument = Annotated[
    str,
    typer.Argument(help="An embedded model (tiny_sd, tiny_flux, tiny_wan, tiny_lm), a folder, or a name on the Hub."),
]
RecipeOption = Annotated[
    str, typer.Option(help=f"Number formats of attention's matmuls: {RECIPES}. Pipelines also take mixed.")
]
ScalingOption = Annotated[str, typer.Option(help=f"How quantisation scales are chosen: {', '.join(SCALINGS)}.")]
DeviceOption = Annotated[
    str, typer.Option(help="The device: cpu, cuda, cuda:1, ...; auto is a GPU if there is one, else the CPU.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help=f"Run in {', '.join(DTYPES[:-1])} or {DTYPES[-1]}. Default: float32 on a CPU, else bfloat16."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else on stdout.")]
CsvOption = Annotated[Path | None, typer.Option(help="A results.csv to append the figures to.")]
StepsOption = Annotated[int, typer.Option(min=1, help="The number of denoising steps.")]
MOST_IMAGES = 10_000
CONFIGS = ("model_index.json", "config.json")  # of a pipeline, and of a model alone
HUB_SECONDS = 5
ImagesOption = Annotated[int, typer.Option(min=1, max=MOST_IMAGES, help="The number of pictures.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Pictures, or pieces of text, in one call.")]
SeedOption = Annotated[int, typer.Option(min=0, max=2**62, help="The seed of the first picture. Later ones count up.")]


@contextmanager
def answer(as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield a dict for a command's results, and with `as_json` print it at the end instead of tables.

    It is also printed if the command then fails, such as on a full disk, so that no result is lost. A ValueError, such
    as of a pipeline that can't draw with so many steps, becomes a message of one line.
    """
    found: dict[str, Any] = {}
    before, console.quiet = console.quiet, as_json or console.quiet
    try:
        yield found
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        console.quiet = before
        if as_json and found:
            typer.echo(json.dumps(plain_data(found), indent=1, allow_nan=False))


def quality_data(result) -> dict[str, Any]:
    """Return an evaluation.quality.Quality as data, without differences if no call ran in INT8."""
    data = asdict(result)
    return data if result.is_ours else data | dict.fromkeys(("psnr_db", "ssim", "attention_sqnr_db"))


def own_dtype(device: torch.device) -> torch.dtype:
    """Return the default dtype of a pipeline on this device."""
    import torch

    return torch.float32 if device.type == "cpu" else torch.bfloat16


def fail(message: str) -> NoReturn:
    """End the command with this message and exit code 1."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(1)


def example_prompts(count: int, pipeline: str = "") -> list[str]:
    """Return `count` prompts in the embedded pipelines' vocabulary. The first 64 all differ.

    pipeline: name of the pipeline. For one of pipelines.VIDEOS the prompts are of clips.
    """
    if pipeline in pipelines.VIDEOS:
        return _clip_prompts(count)
    shapes = ("circle", "star", "heart", "square", "ring", "triangle", "diamond", "cross")
    colors = ("red", "yellow", "green", "white", "orange", "cyan", "purple", "black")
    grounds = ("blue", "black", "white", "purple", "green", "red", "yellow")
    picks = ((colors[(i + i // 8) % 8], shapes[i % 8], grounds[i % 7]) for i in range(2 * count + 64))
    texts = [f"a {color} {shape} on a {ground} background" for color, shape, ground in picks if color != ground]
    return texts[:count]


def clip_arguments(pipeline: str) -> dict[str, Any]:
    """Return call arguments of an embedded pipeline of clips, such as the size; {} for any other."""
    return pipelines.call_arguments(pipeline) if pipeline in pipelines.VIDEOS else {}


def _clip_prompts(count: int) -> list[str]:
    shapes = ("square", "triangle", "cross", "circle")
    colors = ("red", "yellow", "green", "cyan", "blue", "purple", "white")
    motions = ("moving left", "bouncing", "moving up", "standing still", "moving right", "moving down")
    grounds = ("blue", "black", "white", "purple", "green", "red", "yellow", "cyan")
    picks = (
        (colors[i % 7], shapes[i % 4], motions[(i + i // 7) % 6], grounds[(i + i // 3) % 8])
        for i in range(2 * count + 64)
    )
    texts = [f"a {color} {shape} {motion} on a {ground} background" for color, shape, motion, ground in picks
             if color != ground]  # fmt: skip
    return texts[:count]


def torch_device(device: str) -> torch.device:
    """Return the device of this name. "auto" is a GPU if there is one. Raises: typer.BadParameter."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, dtype=torch.float32, device=chosen)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise typer.BadParameter(f"{device}: {str(error).splitlines()[0]}", param_hint="--device") from error
    if chosen.type == "meta":
        raise typer.BadParameter("meta: it holds no numbers, expected one such as cpu or cuda", param_hint="--device")
    return chosen


def quiet_diffusers():
    """Return diffusers, with its and transformers' progress bars and hints off.

    Raises: ImportError with the pip command, if it is not installed.
    """
    _quiet("transformers", "diffusers")
    return _quiet("diffusers", "diffusers")


def _quiet(name: str, extra: str) -> Any:
    """Return diffusers or transformers, as `quiet_diffusers`. extra: the extra that installs it."""
    try:
        library = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error.name} is not installed: {pip_install(extra)}") from error
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def locate(name: str, *, with_texts: bool = False) -> str:
    """Return the folder or Hub name that diffusers loads for `name`.

    with_texts: the command takes language models, too. Raises: typer.BadParameter if `name` is no embedded model, no
        folder and no name on the Hub.
    """
    from ..evaluation.held_out_text import EMBEDDED_NAME

    if name in (*pipelines.PIPELINES, *pipelines.VIDEOS):
        try:
            return str(pipelines.path(name))
        except FileNotFoundError as error:
            raise typer.BadParameter(str(error)) from error
    embedded = [*pipelines.names(), *pipelines.video_names(), *[EMBEDDED_NAME] * with_texts]
    what, known = "model" if with_texts else "pipeline", f"the embedded ones are {', '.join(embedded)}"
    if not name.strip():
        raise typer.BadParameter(f"got an empty name, expected a {what}; {known}", param_hint="MODEL")
    if name == EMBEDDED_NAME and not with_texts:
        raise typer.BadParameter(f"{name} is a language model, expected a pipeline; {known}")
    folder = Path(name)
    if folder.is_dir():
        if not any((folder / file).is_file() for file in CONFIGS):
            raise typer.BadParameter(f"folder {name} has no model_index.json and no config.json; {known}")
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise typer.BadParameter(f"{name!r} is no embedded {what}, no folder and no name on the Hub; {known}")
    else:
        _check_hub(name, known)
    return name


def _check_hub(name: str, known: str) -> None:
    """Raise typer.BadParameter for a name that is not in the local cache, while the Hub can't be reached.

    Of one that is there, the libraries then ask nothing of the Hub, which they would try for a minute.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if not constants.HF_HUB_OFFLINE and _hub_answers(constants.ENDPOINT):
        return
    constants.HF_HUB_OFFLINE = True
    if not any(isinstance(try_to_load_from_cache(name, file), str) for file in CONFIGS):
        raise typer.BadParameter(
            f"{name} is not in the Hub's local cache, and {constants.ENDPOINT} can't be reached or HF_HUB_OFFLINE is "
            f"set; expected a folder (for time --random one of configs and tokenizers will do) or an embedded model: "
            f"{known}",
            param_hint="MODEL",
        )


@functools.cache
def _hub_answers(address: str) -> bool:
    """Return False if nothing answers at an address within seconds."""
    from huggingface_hub import get_session

    try:
        get_session().head(address, timeout=HUB_SECONDS)
    except Exception:  # of either HTTP library that huggingface_hub has had
        return False
    return True


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises: ValueError if it is something else."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"its {path.name} has a {type(found).__name__}, expected a JSON object")
    return found


def load_pipeline(name: str, device: str, dtype: str | None = None):
    """Return a pipeline on a device, in a dtype.

    device: as in `torch_device`. dtype: one of DTYPES; None is that of `own_dtype`.
    """
    import torch

    diffusers, where = quiet_diffusers(), torch_device(device)
    source = locate(name)
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype}: expected one of {', '.join(DTYPES)}", param_hint="--dtype")
    chosen = own_dtype(where) if dtype is None else getattr(torch, dtype)
    if chosen == torch.float32:
        torch.backends.cudnn.allow_tf32 = False  # torch's default rounds convolutions to 10 bits of mantissa
    with refusing(name):  # torch_dtype was renamed in diffusers 0.42, but is the only name in 0.36
        pipe = diffusers.DiffusionPipeline.from_pretrained(source, torch_dtype=chosen, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    if where.type == "cpu" and chosen != torch.float32:  # 16-bit convolutions of a CPU take 30 times as long otherwise
        for model in pipe.components.values():
            if isinstance(model, torch.nn.Module):
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return pipe.to(where)


class _Skeleton:
    """Stand-in for a pipeline with the components for `apply`: models without weights, and the scheduler."""

    def __init__(self, components: dict):
        self.components = components
        self.scheduler = components.get("scheduler")


def load_skeleton(name: str, *, with_texts: bool = False):
    """Return a pipeline or model built from its configs alone, without weights. with_texts: of `locate`."""
    import torch

    diffusers, source = quiet_diffusers(), locate(name, with_texts=with_texts)

    def build(class_name: str, **where):
        cls = getattr(diffusers, class_name)
        config = cls.load_config(source, **where)
        if not issubclass(cls, diffusers.ModelMixin):
            return cls.from_config(config)
        with torch.device("meta"):
            return cls.from_config(config).eval()  # as from_pretrained leaves it

    with refusing(name):
        if (Path(source) / "config.json").is_file() and not (Path(source) / "model_index.json").is_file():
            config = read_object(Path(source) / "config.json")
            if "_class_name" not in config:
                raise ValueError("its config.json has no _class_name, as models of diffusers have")
            return build(config["_class_name"])
        index = diffusers.DiffusionPipeline.load_config(source)
        parts = {
            part: pair[1] for part, pair in index.items() if isinstance(pair, (list, tuple)) and pair[0] == "diffusers"
        }
        return _Skeleton(
            {part: build(class_name, subfolder=part) for part, class_name in parts.items() if part != "vae"}
        )


def load_language_skeleton(name: str):
    """Return a transformers model built from its config, without weights; None if `name` is not one."""
    import torch

    from ..evaluation.held_out_text import EMBEDDED_NAME
    from ..evaluation.held_out_text import locate as text_folder

    source = str(text_folder(name)) if name == EMBEDDED_NAME else locate(name, with_texts=True)
    with refusing(name):
        if Path(source).is_dir():
            files = [Path(source) / file for file in CONFIGS]
            if files[0].is_file() or "model_type" not in read_object(files[1]):
                return None
            transformers = _quiet("transformers", "transformers")
        else:
            transformers, diffusers = _quiet("transformers", "transformers"), quiet_diffusers()
            if _is_found(diffusers.DiffusionPipeline.load_config, source):
                return None
            if not _is_found(transformers.AutoConfig.from_pretrained, source, trust_remote_code=False):
                return None
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        kind: Any = getattr(transformers, (config.architectures or [""])[0], None)
        is_known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        with torch.device("meta"):
            made = kind(config) if is_known else transformers.AutoModel.from_config(config, trust_remote_code=False)
        return made.eval()


def _is_found(load, source: str, **options) -> bool:
    try:
        load(source, **options)
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def steps_bar(label: str, total: int, done: int = 0, unit: str = "steps"):
    """Show a progress bar. Yields a function that advances it by one step. done: steps of an earlier call."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    # with --json stdout is for data
    where = Console(stderr=True) if console.quiet else console
    with Progress(*columns, console=where, disable=console.quiet and not where.is_terminal) as progress:
        task = progress.add_task(label, total=total, completed=done)
        yield lambda: progress.advance(task)
