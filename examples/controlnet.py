"""ControlNet: an outline decides the shapes, with INT8 attention in both models.

python examples/controlnet.py --compare  # offline: tiny_sd, and a ControlNet made of it that was not trained
python examples/controlnet.py "an owl" --image edges.png --model stable-diffusion-v1-5/stable-diffusion-v1-5 \
    --controlnet lllyasviel/control_v11p_sd15_canny
"""

import small_adapters
import torch
from command_line import SHAPES, CommandLine, image
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=30, output="controlnet.png")
    line.add_argument("--image", type=image, default=SHAPES, help="the outline")
    line.add_argument("--controlnet", default="lllyasviel/control_v11p_sd15_canny", help="name on the Hub or folder")
    args = line.parse_args()
    with line.loading(small_adapters.sd15_controlnet) as model:
        dtype, place = line.dtype(torch.float16), {"subfolder": "controlnet"} if line.is_small else {}
        extra = ControlNetModel.from_pretrained(
            model if line.is_small else args.controlnet, torch_dtype=dtype, **place
        )
        pipe = StableDiffusionControlNetPipeline.from_pretrained(model, controlnet=extra, torch_dtype=dtype)
        pipe.to(args.device)
    handle = pipe.set_attn_processor(line.attention())  # the one line: denoiser and ControlNet
    line.show(pipe, handle, prompt=args.prompt, image=args.image, guidance_scale=7.5)


if __name__ == "__main__":
    main()
