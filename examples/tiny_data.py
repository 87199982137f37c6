"""Pictures of coloured shapes and their captions: the data of the embedded pipelines.

Everything is drawn with signed distance functions in torch, so a batch is made on the device that trains, in a few
milliseconds and anti-aliased. A picture is described by a `Scene` batch of small integers; the same integers index the
table of all captions, so no Python runs per picture during training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "diamond")
PALETTE = {  # name -> (base colour, second tone of a patterned background), 0..255
    "red": ((215, 35, 40), (146, 24, 27)),
    "orange": ((245, 130, 30), (170, 90, 21)),
    "yellow": ((250, 220, 50), (190, 165, 35)),
    "green": ((40, 160, 70), (25, 105, 45)),
    "cyan": ((60, 205, 225), (42, 145, 160)),
    "blue": ((35, 75, 205), (22, 48, 135)),
    "purple": ((135, 50, 175), (88, 32, 115)),
    "white": ((245, 245, 245), (190, 190, 190)),
    "black": ((22, 22, 26), (70, 70, 74)),
}
COLORS = tuple(PALETTE)
PATTERNS = ("plain", "striped", "checkered", "gradient")
SIZES = ("", "small ", "large ")
RADII = ((0.28, 0.66), (0.26, 0.34), (0.52, 0.68))  # of SIZES, where the picture spans [-1, 1]
TEMPLATES = (
    ("a {noun} on a {ground} background", "a {noun}"),
    ("{noun} on a {ground} background", "{noun}"),
    ("a {noun} on {ground}", "a picture of a {noun}"),
    ("a drawing of a {noun} on a {ground} background", "a drawing of a {noun}"),
)
GROUNDS = 1 + len(COLORS) * len(PATTERNS)  # 0: the caption does not mention the background
MAX_TILT = math.pi / 12


@dataclass
class Scene:
    """What a batch of pictures shows: int64 vectors [B] that index the tables above; `ground` 0 means not said."""

    shape: torch.Tensor
    color: torch.Tensor
    ground_color: torch.Tensor
    pattern: torch.Tensor
    size: torch.Tensor
    template: torch.Tensor
    ground: torch.Tensor

    def caption_index(self) -> torch.Tensor:
        """Row of each caption in `captions()`, int64 [B]."""
        index = self.template * len(SIZES) + self.size
        index = index * len(COLORS) + self.color
        index = index * len(SHAPES) + self.shape
        return index * GROUNDS + self.ground


def captions() -> list[str]:
    """Every caption, in the order of `Scene.caption_index`."""
    grounds = [f"{'' if p == 'plain' else p + ' '}{c}" for c in COLORS for p in PATTERNS]
    rows = []
    for said, unsaid in TEMPLATES:
        for size in SIZES:
            for color in COLORS:
                for shape in SHAPES:
                    noun = f"{size}{color} {shape}"
                    rows.append(_article(unsaid.format(noun=noun)))
                    rows.extend(_article(said.format(noun=noun, ground=g)) for g in grounds)
    return rows


def _article(text: str) -> str:
    return text.replace("a orange", "an orange")


def sample_scene(batch: int, device: torch.device, generator: torch.Generator | None = None) -> Scene:
    """Draw `batch` scenes; the background never has the colour of the shape, and 3 captions of 4 mention it."""

    def pick(n: int) -> torch.Tensor:
        return torch.randint(n, (batch,), device=device, generator=generator)

    def chance(p: float) -> torch.Tensor:
        return torch.rand(batch, device=device, generator=generator) < p

    color = pick(len(COLORS))
    ground_color = (color + 1 + pick(len(COLORS) - 1)) % len(COLORS)
    pattern = torch.where(chance(0.5), 0, pick(len(PATTERNS)))
    ground = torch.where(chance(0.75), 1 + ground_color * len(PATTERNS) + pattern, 0)
    return Scene(pick(len(SHAPES)), color, ground_color, pattern, pick(len(SIZES)), pick(len(TEMPLATES)), ground)


def draw(scene: Scene, pixels: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Pictures of `scene`, float32 [B, 3, pixels, pixels] in [-1, 1]; place, tilt, size and light are random."""
    batch, device = scene.shape.shape[0], scene.shape.device

    def uniform(low: float | torch.Tensor, high: float | torch.Tensor) -> torch.Tensor:
        return low + (high - low) * torch.rand(batch, 1, 1, device=device, generator=generator)

    def rows(table: list) -> torch.Tensor:
        return torch.tensor(table, dtype=torch.float32, device=device)

    axis = (torch.arange(pixels, device=device, dtype=torch.float32) + 0.5) * (2 / pixels) - 1
    y, x = axis[None, :, None], axis[None, None, :]
    low, high = rows([r[0] for r in RADII])[scene.size], rows([r[1] for r in RADII])[scene.size]
    radius = uniform(low[:, None, None], high[:, None, None])
    room = 0.94 - radius
    distance = signed_distance(
        scene.shape[:, None, None],
        x,
        y,
        uniform(-1, 1) * room,
        uniform(-1, 1) * room,
        radius,
        uniform(-MAX_TILT, MAX_TILT),
    )
    inside = _coverage(-distance, pixels)

    base = rows([PALETTE[c][0] for c in COLORS])
    tone = rows([PALETTE[c][1] for c in COLORS])
    # A pattern is a weight in [0, 1] of the second tone; stripes run at multiples of 45 degrees, boards stand upright.
    angle = torch.randint(4, (batch, 1, 1), device=device, generator=generator) * (math.pi / 4)
    u = x * angle.cos() + y * angle.sin()
    period = uniform(0.28, 0.55)
    stripes = _coverage(_wave(u, period, uniform(0, 1)), pixels)
    period_board = period * 1.4
    board = _xor(*(_coverage(_wave(w, period_board, uniform(0, 1)), pixels) for w in (x, y)))
    pattern = scene.pattern[:, None, None]
    weight = torch.where(pattern == 1, stripes, torch.zeros_like(stripes))
    weight = torch.where(pattern == 2, board, weight)
    weight = torch.where(pattern == 3, (u / 1.42 + 1) / 2, weight)[:, None]

    jitter = 12 * (torch.rand(2, batch, 3, 1, 1, device=device, generator=generator) - 0.5)
    front = base[scene.color][:, :, None, None] + jitter[0]
    back = torch.lerp(base[scene.ground_color][:, :, None, None], tone[scene.ground_color][:, :, None, None], weight)
    light = 1 + 0.05 * (uniform(-1, 1) * x + uniform(-1, 1) * y)[:, None]
    image = torch.lerp((back + jitter[1]) * light, front * light, inside[:, None])
    return image.clamp_(0, 255) / 127.5 - 1


def signed_distance(shape, x, y, center_x, center_y, radius, tilt) -> torch.Tensor:
    """Distance to the outline (negative inside) of SHAPES[shape] with the given circumradius; arguments broadcast."""
    dx, dy = (x - center_x) / radius, (y - center_y) / radius
    px, py = dx * tilt.cos() + dy * tilt.sin(), dy * tilt.cos() - dx * tilt.sin()
    ax, ay, rho = px.abs(), py.abs(), (px * px + py * py).sqrt()

    square = torch.maximum(ax, ay) - 0.78
    triangle = torch.maximum(py - 0.5, ax * (math.sqrt(3) / 2) - py / 2 - 0.5)
    ring = (rho - 0.78).abs() - 0.21
    cross = torch.minimum(torch.maximum(ax - 0.95, ay - 0.32), torch.maximum(ax - 0.32, ay - 0.95))
    diamond = (ax / 0.7 + ay - 1) / math.hypot(1 / 0.7, 1)
    # Star: fold the plane into one half of one tip; the outline there is the segment from the tip to the inner corner.
    fifth = 2 * math.pi / 5
    turn = torch.remainder(torch.atan2(px, -py) + fifth / 2, fifth) - fifth / 2
    inner = (0.44 * math.cos(fifth / 2), 0.44 * math.sin(fifth / 2))
    edge = math.hypot(1 - inner[0], inner[1])
    star = ((rho * turn.cos() - 1) * inner[1] + rho * turn.sin().abs() * (1 - inner[0])) / edge
    # Heart: a square standing on its corner with a half circle on each of its two upper sides.
    half = 0.8
    tip = (ax + (py - 0.15).abs() - half) / math.sqrt(2)
    lobes = ((ax - half / 2) ** 2 + (py - 0.15 + half / 2) ** 2).sqrt() - half / math.sqrt(2)
    distance = rho - 1
    for index, other in enumerate((square, triangle, star, ring, cross, torch.minimum(tip, lobes), diamond), start=1):
        distance = torch.where(shape == index, other, distance)
    return distance * radius


def _coverage(depth: torch.Tensor, pixels: int) -> torch.Tensor:
    """Share of a pixel that lies inside, from the depth (positive inside) at its centre: a ramp one pixel wide."""
    return (depth * (pixels / 2) + 0.5).clamp(0, 1)


def _wave(u: torch.Tensor, period: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """Depth inside the darker half of a stripe pattern along u: a triangle wave in units of length."""
    place = torch.remainder(u / period + phase, 1.0)
    return period * (0.25 - (place - 0.5).abs())


def _xor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b - 2 * a * b
