"""A vision encoder with INT8 attention: SigLIP, CLIP, DINOv2, ViT and others that AutoModel loads.

python examples/vision_encoder.py --compare  # offline, random weights
python examples/vision_encoder.py --image owl.png --model google/siglip2-so400m-patch16-512 --compare

A picture is some hundred to some thousand tokens: on a large GPU such calls may run in 16 bit, as the report says.
"""

import time

import small_models
import torch
from command_line import SHAPES, CommandLine, image
from transformers import AutoImageProcessor, AutoModel

import sage_processors as sp
from sage_processors.cli.arguments import at_least


@torch.no_grad()
def main() -> None:
    line = CommandLine(__doc__)
    line.add_argument("--image", type=image, default=SHAPES)
    line.add_argument("--batch", type=at_least(1), default=2, help="pictures at a time")
    line.add_argument("--compare", action="store_true", help="also with stock attention: how far the features are")
    args = line.parse_args()
    with line.loading(small_models.vision) as name:
        processor = AutoImageProcessor.from_pretrained(name)
        model = AutoModel.from_pretrained(name, dtype=line.dtype(torch.bfloat16)).eval().to(args.device)
        model = getattr(model, "vision_model", model)  # of a pair with text
    pixels = processor([args.image] * args.batch, return_tensors="pt")["pixel_values"].to(model.device, model.dtype)

    def features() -> torch.Tensor:
        start = time.perf_counter()
        with line.running():
            found = model(pixels).last_hidden_state.float().cpu()
        print(f"{tuple(found.shape)} features in {time.perf_counter() - start:.3f} s")
        return found

    stock = features() if args.compare else None
    model.set_attn_implementation(line.implementation())  # the one line
    ours = features()
    sp.attention_report(model).print()
    if stock is not None:
        error, size = (x.norm(dim=-1) for x in (ours - stock, stock))
        print(f"Relative error against stock attention: mean {(error / size).mean():.1e}, worst token "
              f"{(error / size).max():.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
