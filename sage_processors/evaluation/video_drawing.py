"""Draw a clip as a strip of frames, and as a GIF of stock and INT8 side by side."""

from __future__ import annotations

import io
from pathlib import Path

import torch

from ..files.whole_file import write_whole
from .side_by_side import amplification, side_by_side


GIF_COLORS = 128


def strip(stock: torch.Tensor, ours: torch.Tensor, *, columns: int = 6, cell: int = 128, ran: bool = True):
    """Draw frames of one clip in three rows: stock, INT8, their amplified difference.

    Args:
        stock, ours: [T, 3, H, W] floating point in [0, 1], the same clip drawn both ways.
        columns: number of frames shown, evenly over the clip from the first to the last; at least 1.
        cell: width of the shown frames in pixels. ran: True if any call of `ours` ran in INT8.
    Returns: PIL.Image.Image, RGB. Raises: ValueError if shapes differ or columns is less than 1.
    """
    _check(stock, ours)
    if isinstance(columns, bool) or not isinstance(columns, int) or columns < 1:
        raise ValueError(f"columns: got {columns!r}, expected an int of at least 1")
    picked = (
        torch.linspace(0, len(stock) - 1, min(columns, len(stock)), dtype=torch.float64, device="cpu").round().long()
    )
    titles = [f"frame {index + 1}" for index in picked.tolist()]
    gain = amplification(stock, ours)  # one for all frames, so that they can be compared
    return side_by_side(stock[picked], ours[picked], titles, gain, cell=cell, ran=ran)


def gif(stock: torch.Tensor, ours: torch.Tensor, path: str | Path, *, fps: int = 8, cell: int = 128) -> Path:
    """Write a GIF with stock, INT8 and their amplified difference beside each other, and return its path.

    Consecutive frames that are equal become one frame in the file, shown as long as all of them.

    Args:
        stock, ours: as for `strip`. path: a name that ends in .gif, in a folder that exists.
        fps: frames a second, 1 to 50. cell: width of a shown frame in pixels.
    Raises: ValueError.
    """
    _check(stock, ours)
    path = Path(path)
    if path.suffix != ".gif" or not path.parent.is_dir():
        raise ValueError(f"path: got {str(path)!r}, expected a .gif in a folder that exists")
    if isinstance(fps, bool) or not isinstance(fps, int) or not 1 <= fps <= 50:
        raise ValueError(f"fps: got {fps!r}, expected an int from 1 to 50, the range of GIFs")
    from PIL import Image

    difference = (ours - stock).abs() * amplification(stock, ours)
    beside = torch.cat([stock, ours, difference], 3).clamp(0, 1)
    height, width = round(cell * stock.shape[2] / stock.shape[3]), 3 * cell
    frames = []
    for frame in beside:
        pixels = (frame * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
        shown = Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST)
        frames.append(shown.quantize(GIF_COLORS, dither=Image.Dither.NONE))
    written = io.BytesIO()
    frames[0].save(
        written, format="gif", save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0, disposal=2
    )
    write_whole(path, written.getvalue())
    return path


def _check(stock: torch.Tensor, ours: torch.Tensor) -> None:
    if stock.shape != ours.shape or stock.dim() != 4 or len(stock) == 0:
        raise ValueError(
            f"ours: got {tuple(ours.shape)} for a stock clip {tuple(stock.shape)}, expected equal shapes [T, 3, H, W]"
        )
