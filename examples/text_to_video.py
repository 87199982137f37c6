"""Text to video with INT8 attention: Wan, CogVideoX, LTX, HunyuanVideo and every other diffusers video pipeline.

python examples/text_to_video.py --model ltx        (offline, random weights: noise; or wan, cogvideox, hunyuan_video)
python examples/text_to_video.py "a cat on a surfboard" --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --steps 50
"""

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import export_to_gif

import sage_processors as sp
from sage_kernels import RECIPES
from sage_processors.cli.arguments import OneLineParser, at_least, gif
from sage_processors.options import SCALINGS
from sage_processors.pipelines.random_video import FAMILIES, random_video


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("prompt", nargs="?", default="a cat on a surfboard")
    parser.add_argument("--model", default="wan", help=f"name on the Hub, folder, or random weights: {list(FAMILIES)}")
    parser.add_argument("--recipe", choices=RECIPES, default="qk_int8_pv_bf16")
    parser.add_argument("--scaling", choices=SCALINGS, default="timestep")
    parser.add_argument("--steps", type=at_least(1), default=10)
    for name in ("num_frames", "height", "width"):
        parser.add_argument(f"--{name}", type=at_least(1), help="default: what the pipeline makes on its own")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--compare", action="store_true", help="also draw with stock attention, print PSNR and SSIM")
    parser.add_argument("--output", type=gif, default="video.gif")
    args = parser.parse_args()

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with parser.loading(args.model):
        if args.model in FAMILIES:
            pipe, inputs = random_video(args.model, device=device)
        else:
            pipe = DiffusionPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)
            inputs = {"prompt": args.prompt}
    inputs |= {"num_inference_steps": args.steps, "output_type": "pt"}
    inputs |= {name: getattr(args, name) for name in ("num_frames", "height", "width") if getattr(args, name)}

    def draw() -> torch.Tensor:  # [frames, 3, H, W] in [0, 1]
        return pipe(**inputs, generator=torch.Generator().manual_seed(args.seed)).frames[0].float().cpu()

    config = sp.SageAttnProcessor(recipe=args.recipe, scaling=args.scaling)
    with parser.running(), pipe.set_attn_processor(config) as handle:
        video = draw()
        (report := handle.report()).print()
    export_to_gif(pipe.video_processor.numpy_to_pil(pipe.video_processor.pt_to_numpy(video)), str(args.output))
    print(f"Video: {args.output}")
    if args.compare:
        stock = draw()
        psnr, ssim = sp.metrics.psnr(video, stock).mean(), sp.metrics.ssim(video, stock).mean()
        numbers = f"PSNR {psnr:.2f} dB, SSIM {ssim:.5f}" if report.calls else "no call ran in INT8: no difference"
        print(f"{numbers} against stock attention, means over {len(video)} frames")


if __name__ == "__main__":
    main()
