"""Text to image with INT8 attention: any diffusers checkpoint by name or folder; without --model the embedded one.

python examples/text_to_image.py "a red circle on a blue background" --compare
python examples/text_to_image.py "an owl at dusk" --model black-forest-labs/FLUX.1-dev --steps 28
"""

import torch
from diffusers import DiffusionPipeline

import sage_processors as sp
from sage_kernels import RECIPES
from sage_processors.cli.arguments import OneLineParser, at_least, picture
from sage_processors.evaluation.side_by_side import amplification, side_by_side
from sage_processors.options import SCALINGS


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("prompt", nargs="?", default="a red circle on a blue background")
    parser.add_argument("--model", default="tiny_sd", help="name on the Hub, folder, or embedded: tiny_sd, tiny_flux")
    parser.add_argument("--recipe", choices=RECIPES, default="qk_int8_pv_bf16")
    parser.add_argument("--scaling", choices=SCALINGS, default="timestep")
    parser.add_argument("--steps", type=at_least(1), default=25)
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--compare", action="store_true", help="also draw with stock attention, print PSNR and SSIM")
    parser.add_argument("--output", type=picture, default="image.png")
    args = parser.parse_args()

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = sp.pipelines.path(args.model) if args.model in sp.pipelines.names() else args.model
    with parser.loading(args.model):
        pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=dtype).to(device)
        config = sp.SageAttnProcessor(recipe=args.recipe, scaling=args.scaling)
        handle = pipe.set_attn_processor(config)  # the one line

    options = {"steps": args.steps, **sp.pipelines.call_arguments(args.model)}
    image = sp.quality.generate(pipe, [args.prompt], [args.seed], **options)
    (report := handle.report()).print()
    handle.remove()  # stock attention again

    pipe.image_processor.postprocess(image * 2 - 1)[0].save(args.output)
    print(f"Picture: {args.output}")
    if args.compare:
        stock = sp.quality.generate(pipe, [args.prompt], [args.seed], **options)
        psnr, ssim = sp.metrics.psnr(image, stock).item(), sp.metrics.ssim(image, stock).item()
        numbers = f"PSNR {psnr:.2f} dB, SSIM {ssim:.5f}" if report.calls else "no call ran in INT8: no difference"
        print(f"{numbers} against stock attention")
        comparison = args.output.with_stem(args.output.stem + "_compare")
        side_by_side(stock, image, [args.prompt], amplification(stock, image), ran=report.calls > 0).save(comparison)
        print(f"Side by side: {comparison}")


if __name__ == "__main__":
    main()
