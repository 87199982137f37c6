"""The command line that all examples share: options, messages of one line, and the results at the end.

An example makes a `CommandLine`, loads its pipeline in `with line.loading(...)`, swaps attention, and calls `show`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import sage_processors as sp
from sage_kernels import RECIPES
from sage_processors.cli.arguments import OneLineParser, at_least, clip, picture
from sage_processors.cli.checks import save_picture
from sage_processors.cli.loading import quiet_diffusers
from sage_processors.evaluation.quality import MIN_TOKENS
from sage_processors.evaluation.side_by_side import amplification, side_by_side
from sage_processors.option_groups import LINEARS, SCALINGS


SMALL = "small"
SHAPES = str(Path(__file__).with_name("shapes.png"))  # a red circle on blue, where an example is given no picture
SIZES = ("height", "width", "num_frames")


class Drawn(NamedTuple):
    """What a call of a pipeline drew: pictures or frames, [N, 3, H, W] float32 in [0, 1] on the CPU, and its time.

    The time of a first call is longer: kernels are compiled, memory is allocated.
    """

    pictures: torch.Tensor
    seconds: float


class CommandLine(OneLineParser):
    """--model --recipe --seed, and for pipelines --linears, --scaling, --steps, sizes, --compare and --output.

    Args:
        description: of the example; shown by --help as it is written.
        prompt: the default one; None: the example asks for none.
        steps: the usual number of denoising steps; None: it denoises nothing, and its scales are always per token.
        output: the file's default name, x.png or x.gif (then .mp4 will do, too); None: nothing is written.
    """

    def __init__(
        self,
        description: str | None,
        *,
        prompt: str | None = None,
        steps: int | None = None,
        output: str | None = None,
    ) -> None:
        super().__init__(description)
        self.small: dict[str, Any] = {}  # call arguments that a small model needs
        if prompt is not None:
            self.add_argument("prompt", nargs="?", default=prompt)
        self.add_argument("--model", default=SMALL, help="name on the Hub or folder; small: runs offline (default)")
        self.add_argument("--recipe", choices=RECIPES, default="qk_int8_pv_bf16")
        self.add_argument("--seed", type=at_least(0), default=0)
        if steps is not None:
            self.add_argument("--linears", choices=LINEARS, help="of a checkpoint: as preset fast; small: none")
            self.add_argument("--scaling", choices=SCALINGS, default="timestep")
            self.add_argument("--steps", type=at_least(1), default=steps)
        if output is not None:
            for name in SIZES if output.endswith(".gif") else SIZES[:2]:
                self.add_argument(f"--{name}", type=at_least(1), help="default: what the pipeline makes on its own")
            self.add_argument("--compare", action="store_true", help="also with stock attention: print PSNR and SSIM")
            self.add_argument("--output", type=clip if output.endswith(".gif") else picture, default=output)

    def parse_args(self, args=None, namespace=None):  # type: ignore[override]
        """As argparse's, and `device`: the GPU, or the CPU where there is none."""
        self.args = super().parse_args(args, namespace)
        self.args.device = "cuda" if torch.cuda.is_available() else "cpu"
        return self.args

    def dtype(self, checkpoint: torch.dtype = torch.bfloat16) -> torch.dtype:
        """What the checkpoint runs in on a GPU; fp32 on a CPU."""
        return checkpoint if self.args.device == "cuda" else torch.float32

    @contextmanager
    def loading(self, small: Callable[[], tuple[Any, dict]]) -> Iterator[str]:  # type: ignore[override]
        """What `from_pretrained` is to load: --model, or the folder of a small model, kept as long as the block runs.

        small: makes (a folder, or a pipeline or model to save; the call arguments that it needs).
        """
        with ExitStack() as stack:
            quiet_diffusers()
            name = self.args.model
            stack.enter_context(super().loading(name))
            if name == SMALL:
                source, self.small = small()
                if not isinstance(source, Path):
                    folder = stack.enter_context(tempfile.TemporaryDirectory())
                    source.save_pretrained(folder)
                    source = folder
                name = str(source)
            elif name in _embedded():
                name, self.small = str(sp.pipelines.path(name)), sp.pipelines.call_arguments(name)
            yield name

    def attention(self, *, drop_weights: bool = False, **options) -> sp.SageAttnProcessor:
        """Preset "fast" with what the command line asks for; a small model is too small for it."""
        chosen: dict[str, Any] = {name: getattr(self.args, name) for name in ("recipe", "scaling")}
        least = 0 if self.is_small else None
        if self.is_small:
            chosen["min_tokens"] = MIN_TOKENS
        else:
            chosen["preset"] = "small" if drop_weights else "fast"
        if self.is_small or self.args.linears is not None:
            format = self.args.linears or "none"
            chosen["linears"] = sp.Linears(format, min_features=least, drop_weights=drop_weights)
        return sp.SageAttnProcessor(**chosen | options)

    def implementation(self) -> str:
        """The name for `model.set_attn_implementation` that the command line asks for."""
        tokens = 2 if self.is_small else None  # prompts; a token on its own stays exact where the cache is not INT8
        sp.register_transformers("sage_example", recipe=self.args.recipe, min_tokens=tokens)
        return "sage_example"

    @property
    def is_small(self) -> bool:
        """Whether the model is one of those that run offline."""
        return self.args.model == SMALL or self.args.model in _embedded()

    def draw(self, pipe, **inputs) -> Drawn:
        """One call of the pipeline. inputs: as of `show`."""
        args = self.args
        inputs |= self.small | {n: getattr(args, n) for n in SIZES if getattr(args, n, None) is not None}
        start = time.perf_counter()
        with self.running():
            generator = torch.Generator().manual_seed(args.seed)  # of the CPU: the same noise on every device
            found = pipe(num_inference_steps=args.steps, generator=generator, output_type="pt", **inputs)
        pictures = (found.frames[0] if hasattr(found, "frames") else found.images).float().cpu()
        return Drawn(pictures, time.perf_counter() - start)

    def show(self, pipe, handle, **inputs) -> None:
        """Draw, print the report, write the file; with --compare draw with stock attention and say how far it is.

        handle: of the swap; removed afterwards. inputs: of the pipeline's call, but for steps, seed, sizes and type.
        """
        ours = self.draw(pipe, **inputs)
        (report := handle.report()).print()
        handle.remove()  # stock attention again
        self.write(ours, report, self.draw(pipe, **inputs) if self.args.compare else None)

    def write(self, ours: Drawn, report, stock: Drawn | None = None, output: Path | None = None) -> None:
        """Write what was drawn; of stock, what it differs from ours by. output: in the place of --output."""
        from diffusers.utils import export_to_gif, export_to_video

        output = output or self.args.output
        export = {".gif": export_to_gif, ".mp4": export_to_video}.get(output.suffix)
        if export is not None:
            export(pil(ours.pictures), str(output))
        else:
            save_picture(pil(ours.pictures)[0], output)
        print(f"{'Picture' if export is None else 'Video'}: {output}")
        if stock is None:
            return
        print(in_words(ours, report, stock))
        if export is None:
            comparison = output.with_stem(output.stem + "_compare")
            pair, title = (stock.pictures[:1], ours.pictures[:1]), getattr(self.args, "prompt", output.stem)
            save_picture(side_by_side(*pair, [title], amplification(*pair), ran=report.calls > 0), comparison)
            print(f"Side by side: {comparison}")


def _embedded() -> list[str]:
    return [*sp.pipelines.names(), *sp.pipelines.video_names()]


def pil(pictures: torch.Tensor) -> list:
    """PIL pictures of [N, 3, H, W] in [0, 1]."""
    from diffusers.image_processor import VaeImageProcessor

    return VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(pictures))


def in_words(ours: Drawn, report, stock: Drawn) -> str:
    """How far pictures with INT8 attention are from stock's, means, and how long both took."""
    psnr, ssim = (f(ours.pictures, stock.pictures).mean().item() for f in (sp.metrics.psnr, sp.metrics.ssim))
    numbers = f"PSNR {psnr:.2f} dB, SSIM {ssim:.5f}" if report.calls else "no call ran in INT8: no difference"
    return f"{numbers} against stock attention; {ours.seconds:.2f} s, stock {stock.seconds:.2f} s"


def text_file(text: str) -> str:
    """`type=` of a text to read."""
    try:
        return Path(text).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from error


def image(text: str):
    """`type=` of a picture to read."""
    from PIL import Image

    try:
        with Image.open(text) as file:
            return file.convert("RGB")
    except OSError as error:  # not there, or no picture
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from error
