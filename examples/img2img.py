"""Picture to picture with an IP-Adapter and a LoRA, all three with INT8 attention.

python examples/img2img.py --compare  # offline: tiny_sd, an adapter and a LoRA with random weights
python examples/img2img.py "an owl" --model stable-diffusion-v1-5/stable-diffusion-v1-5 --image sketch.png \\
    --style paint.png --ip-adapter h94/IP-Adapter --lora style.safetensors --lora-percent 80

Adapters may be loaded before or after the swap: a later IP-Adapter is swapped at the next forward.
"""

import small_adapters
import torch
from command_line import SHAPES, CommandLine, image
from diffusers import StableDiffusionImg2ImgPipeline

from sage_processors.cli.arguments import at_least


def main() -> None:
    line = CommandLine(__doc__, prompt="a red circle on a blue background", steps=30, output="img2img.png")
    line.add_argument("--image", type=image, default=SHAPES, help="the picture to start from")
    line.add_argument("--style", type=image, default=SHAPES, help="the picture that the IP-Adapter looks at")
    line.add_argument("--ip-adapter", help="name on the Hub or folder that has ip-adapter_sd15.safetensors")
    line.add_argument("--lora", help="name on the Hub, folder or file")
    line.add_argument("--lora-percent", type=at_least(0), default=100, help="how much of the LoRA")
    args = line.parse_args()
    with line.loading(small_adapters.sd15) as model:
        kind, dtype = StableDiffusionImg2ImgPipeline, line.dtype(torch.float16)
        pipe = kind.from_pretrained(model, torch_dtype=dtype).to(args.device)
        more = {}
        if args.ip_adapter or line.is_small:
            folder = {"subfolder": "models", "weight_name": "ip-adapter_sd15.safetensors"}
            pipe.load_ip_adapter(args.ip_adapter or model, **folder)
            pipe.set_ip_adapter_scale(0.6)
            more["ip_adapter_image"] = args.style
        if args.lora or line.is_small:
            pipe.load_lora_weights(args.lora or model, adapter_name="style")
            pipe.set_adapters("style", args.lora_percent / 100)
    handle = pipe.set_attn_processor(line.attention())  # the one line
    line.show(pipe, handle, image=args.image, prompt=args.prompt, strength=0.8, guidance_scale=7.5, **more)


if __name__ == "__main__":
    main()
