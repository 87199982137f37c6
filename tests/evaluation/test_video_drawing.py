"""Strips and GIFs of clips hold the right pixels of the right frames."""

import numpy as np
import torch
from PIL import Image

from sage_processors.evaluation import video_drawing
from sage_processors.evaluation.side_by_side import LABEL, MARGIN


def pair(frames: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames of one grey each, and the same a fifth brighter."""
    stock = (torch.arange(frames) / 16).view(-1, 1, 1, 1).expand(frames, 3, 16, 16).contiguous()
    return stock, stock + 0.2


def test_strip_shows_frames_evenly_from_the_first_to_the_last():
    stock, ours = pair(9)
    pixels = np.asarray(video_drawing.strip(stock, ours, columns=3, cell=32))
    assert pixels.shape[:2] == (3 * (LABEL + 32 + MARGIN), 3 * (32 + MARGIN) + MARGIN)
    for row, shown in enumerate((stock, ours, torch.full_like(stock, 0.8))):  # four times 0.2
        for column, frame in enumerate((0, 4, 8)):
            cell = pixels[row * (LABEL + 32 + MARGIN) + LABEL + 9, MARGIN + column * (32 + MARGIN) + 9]
            assert cell.tolist() == [round(shown[frame, 0, 0, 0].item() * 255)] * 3
    assert video_drawing.strip(stock, ours, columns=50, cell=32).size[0] == 9 * (32 + MARGIN) + MARGIN


def test_gif_has_every_frame_beside_its_own(tmp_path):
    stock, ours = pair()
    stock[3:], ours[3:] = stock[2], ours[2]  # three alike: one, shown as long as three
    path = video_drawing.gif(stock, ours, tmp_path / "clip.gif", fps=10, cell=32)
    with Image.open(path) as image:
        assert image.size == (96, 32) and image.n_frames == 3
        for frame, duration in enumerate((100, 100, 300)):
            image.seek(frame)
            assert image.info["duration"] == duration
            pixels = np.asarray(image.convert("RGB"))[16, [16, 48, 80], 0].tolist()
            expected = [255 * stock[frame, 0, 0, 0].item(), 255 * ours[frame, 0, 0, 0].item(), 0.8 * 255]
            assert np.abs(np.subtract(pixels, expected)).max() <= 1.5, frame  # 8 bits and a palette
