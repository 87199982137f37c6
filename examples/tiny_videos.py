"""Clips of one moving shape and their captions, drawn on the device: the training data of `tiny_wan`.

"a red square moving left behind a blue bar on a white background": colour, shape, motion, an optional bar that hides
the shape for a while, an optional mention of the background. Shapes and colours are those of tiny_data.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields

import tiny_data
import torch


SHAPES = ("circle", "square", "triangle", "cross")
COLORS = ("red", "yellow", "green", "cyan", "blue", "purple", "white")
GROUNDS = (*COLORS, "black")  # of backgrounds and bars
MOTIONS = (
    "moving left",
    "moving right",
    "moving up",
    "moving down",
    "bouncing",
    "rotating",
    "standing still",
)
STRAIGHT, BOUNCING, ROTATING, STILL = 4, 4, 5, 6  # the first four are straight
DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))  # of the straight ones, (x, y) with y downwards
ROUND = SHAPES.index("circle")  # which nobody sees rotate
BAR_SHARE, GROUND_SHARE = 0.25, 0.75  # of straight clips with a bar; of captions that mention the background
RADIUS = (0.36, 0.48)  # where the picture spans [-1, 1]
PALETTE = torch.tensor([tiny_data.PALETTE[name][0] for name in GROUNDS], dtype=torch.float32)


@dataclass
class Scene:
    """What a batch of clips shows: int64 vectors [B]. `bar` and `said` are 0 for none, else 1 + index of GROUNDS.

    `ground` is the background's colour, also where the caption does not say it.
    """

    color: torch.Tensor
    shape: torch.Tensor
    motion: torch.Tensor
    bar: torch.Tensor
    said: torch.Tensor
    ground: torch.Tensor

    def caption_index(self) -> torch.Tensor:
        """Row of each caption in `captions()`, int64 [B]."""
        index = self.color * len(SHAPES) + self.shape
        index = index * len(MOTIONS) + self.motion
        index = index * (1 + len(GROUNDS)) + self.bar
        return index * (1 + len(GROUNDS)) + self.said

    def __getitem__(self, rows) -> Scene:
        return Scene(*(getattr(self, field.name)[rows] for field in fields(self)))

    def to(self, device: torch.device | str) -> Scene:
        return Scene(*(getattr(self, field.name).to(device) for field in fields(self)))


def captions() -> list[str]:
    """Every caption, in the order of `Scene.caption_index`."""
    bars = ["", *(f" behind a {name} bar" for name in GROUNDS)]
    grounds = ["", *(f" on a {name} background" for name in GROUNDS)]
    return [
        f"a {color} {shape} {motion}{bar}{ground}"
        for color in COLORS
        for shape in SHAPES
        for motion in MOTIONS
        for bar in bars
        for ground in grounds
    ]


def sample_scene(batch: int, device: torch.device, generator: torch.Generator | None = None) -> Scene:
    """Draw `batch` scenes. Shape, background and bar have three different colours; what is round never rotates."""

    def pick(n: int) -> torch.Tensor:
        return torch.randint(n, (batch,), device=device, generator=generator)

    def chance(p: float) -> torch.Tensor:
        return torch.rand(batch, device=device, generator=generator) < p

    color, shape, motion = pick(len(COLORS)), pick(len(SHAPES)), pick(len(MOTIONS))
    is_round = shape == ROUND
    motion = torch.where((motion == ROTATING) & is_round, pick(STRAIGHT), motion)
    # the two others: of the colours that are left, counted from the one after the shape's
    first, step = pick(len(GROUNDS) - 1), pick(len(GROUNDS) - 2)
    second = (first + 1 + step) % (len(GROUNDS) - 1)
    ground, bar = ((color + 1 + offset) % len(GROUNDS) for offset in (first, second))
    bar = torch.where((motion < STRAIGHT) & chance(BAR_SHARE), 1 + bar, 0)
    return Scene(color, shape, motion, bar, torch.where(chance(GROUND_SHARE), 1 + ground, 0), ground)


def simple_scene(scene: Scene) -> Scene:
    """The same scenes with what a model too small for all of it can learn: circles and crosses, 4 colours, 4 ways."""
    none, black = torch.zeros_like(scene.color), torch.full_like(scene.color, GROUNDS.index("black"))
    shape = torch.where(scene.shape % 2 == 0, SHAPES.index("circle"), SHAPES.index("cross"))
    return Scene(scene.color % 4, shape, scene.motion % STRAIGHT, none, 1 + black, black)


def draw(scene: Scene, pixels: int, frames: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Clips of `scene`, float32 [B, 3, frames, pixels, pixels] in [-1, 1]; size, place, pace and light are random.

    A motion takes the whole clip: with more frames it is slower per frame.
    """
    batch, device = len(scene.color), scene.color.device

    def uniform(low: float | torch.Tensor, high: float | torch.Tensor) -> torch.Tensor:
        return low + (high - low) * torch.rand(batch, 1, device=device, generator=generator)

    motion = scene.motion[:, None]
    time = torch.linspace(0, 1, frames, device=device)[None] if frames > 1 else torch.zeros(1, 1, device=device)
    radius = uniform(*RADIUS)
    room = 0.96 - radius
    place = torch.stack([uniform(-1, 1) * room, uniform(-1, 1) * room])  # x and y where nothing moves, [2, B, 1]
    tilt = uniform(-tiny_data.MAX_TILT, tiny_data.MAX_TILT)

    palette, directions, _ = _tables(device)
    way = directions[motion[:, 0] % STRAIGHT].T[:, :, None]
    length = uniform(1.3, 2) * room  # of the way, at most all that there is
    start = uniform(-1, 1) * (room - length / 2) - way * length / 2
    straight = torch.where(way != 0, start + way * length * time, place)

    height = uniform(0.8, 1.05)
    floor = room - uniform(0, 1) * (2 * room - height).clamp(min=0)
    bounces = ((uniform(1.5, 2.2) * time + uniform(0, 1)) * math.pi).cos().abs()
    drift = uniform(-0.25, 0.25)
    hop = torch.stack([place[0] * 0.6 + drift * (2 * time - 1), floor - height.minimum(2 * room) * bounces])

    center = torch.where(motion < STRAIGHT, straight, torch.where(motion == BOUNCING, hop, place))  # [2, B, frames]
    turn = (100 + 120 * uniform(0, 1)) * (math.pi / 180) * uniform(-1, 1).sign()
    tilt = tilt + torch.where(motion == ROTATING, turn * time, torch.zeros_like(turn))

    axis = (torch.arange(pixels, device=device, dtype=torch.float32) + 0.5) * (2 / pixels) - 1
    y, x = axis[:, None], axis[None, :]

    def each_pixel(values: torch.Tensor) -> torch.Tensor:
        return values[..., None, None]

    distance = signed_distance(
        each_pixel(scene.shape[:, None]), x, y, each_pixel(center[0]), each_pixel(center[1]), each_pixel(radius),
        each_pixel(tilt),
    )  # fmt: skip
    # the bar stands across the middle of the way
    middle = (start + way * length * uniform(0.42, 0.58))[:, :, :1]
    across = torch.where(way[0, :, :, None] != 0, x - middle[0][..., None], y - middle[1][..., None])  # [B, H, W]
    depth = uniform(0.13, 0.18)[..., None] - across.abs()
    hidden = _coverage(torch.where(scene.bar[:, None, None] > 0, depth, -torch.ones_like(depth)), pixels)

    jitter = 10 * (torch.rand(3, batch, 3, device=device, generator=generator) - 0.5)
    front, back, bar = (
        (palette[index] + shift)[:, :, None, None, None]
        for index, shift in zip((scene.color, scene.ground, (scene.bar - 1).clamp(min=0)), jitter, strict=True)
    )
    image = torch.lerp(back, front, _coverage(-distance, pixels)[:, None])
    image = torch.lerp(image, bar, hidden[:, None, None])
    return image.clamp_(0, 255) / 127.5 - 1


def signed_distance(shape: torch.Tensor, *place) -> torch.Tensor:
    """tiny_data's of SHAPES[shape]."""
    return tiny_data.signed_distance(_tables(shape.device)[2][shape], *place)


@functools.lru_cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PALETTE, DIRECTIONS and tiny_data's numbers of SHAPES where they are needed; a copy for every batch would wait
    for the device."""
    numbers = [tiny_data.SHAPES.index(name) for name in SHAPES]
    directions = torch.tensor(DIRECTIONS, dtype=torch.float32, device=device)
    return PALETTE.to(device), directions, torch.tensor(numbers, device=device)


def _coverage(depth: torch.Tensor, pixels: int) -> torch.Tensor:
    """Share of a pixel that lies inside, from the depth (positive inside) at its centre: a ramp one pixel wide."""
    return (depth * (pixels / 2) + 0.5).clamp(0, 1)
