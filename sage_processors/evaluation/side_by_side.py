"""One sheet with stock and INT8 pictures of the same seeds and their amplified difference."""

from __future__ import annotations

import torch

from ..reporting.layer_report import NOTHING_RAN


MARGIN = 8  # pixels between cells
LABEL = 34  # pixels of text above a row of cells: two lines


def amplification(stock: torch.Tensor, ours: torch.Tensor) -> int:
    """Return the factor that makes the difference of two sets of pictures visible.

    A power of two, 1 to 65536. It shows the 99.9th percentile of the differences at half to full white.
    """
    values = (ours - stock).abs().flatten().float()
    large = torch.topk(values, max(1, values.numel() // 1000)).values[-1].item()
    gain = 1
    while gain < 65536 and 2 * gain * large <= 1:
        gain *= 2
    return gain


def side_by_side(
    stock: torch.Tensor, ours: torch.Tensor, titles: list[str], gain: int, *, cell: int = 256, ran: bool = True
):
    """Draw a sheet of three rows (stock, INT8, |difference| x gain), one column per picture.

    Args:
        stock, ours: [N, 3, H, W] floating point in [0, 1].
        titles: N lines of text above the first row, cut to the cell's width.
        gain: factor of the difference; values above 1 are shown white.
        ran: True if any call of `ours` ran in INT8; if False, the sheet says so.
        cell: width of the shown pictures in pixels, resized without interpolation.
    Returns: PIL.Image.Image, RGB.
    Raises: ValueError if shapes or the number of titles differ.
    """
    from PIL import Image, ImageDraw, ImageFont

    if stock.shape != ours.shape or stock.dim() != 4 or len(titles) != len(stock):
        raise ValueError(
            f"ours: got {tuple(ours.shape)} and {len(titles)} titles for stock pictures {tuple(stock.shape)}, "
            "expected equal shapes [N, 3, H, W] and one title per picture"
        )
    rows = (
        ("stock attention", stock),
        ("INT8 attention" if ran else NOTHING_RAN, ours),
        (f"difference x {gain}", (ours - stock).abs() * gain),
    )
    height = round(cell * stock.shape[2] / stock.shape[3])
    step, letters = cell + MARGIN, cell // 7  # a letter of the font is at most about 7 pixels wide
    canvas = Image.new("RGB", (MARGIN + step * len(stock), (LABEL + height + MARGIN) * 3), "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=13)
    for r, (label, pictures) in enumerate(rows):
        top = r * (LABEL + height + MARGIN)
        for c, picture in enumerate(pictures.clamp(0, 1)):
            lines = [titles[c], label] if r == 0 else [label]
            text = "\n".join(line if len(line) <= letters else line[: letters - 1] + "…" for line in lines)
            draw.multiline_text((MARGIN + c * step, top + 2), text, "black", font=font, spacing=1)
            pixels = (picture * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
            image = Image.fromarray(pixels).resize((cell, height), Image.Resampling.NEAREST)
            canvas.paste(image, (MARGIN + c * step, top + LABEL))
    return canvas
