"""Fréchet distance between two sets of pictures, on the features of a classifier.

`feature_fd` needs no download. Its small classifier comes with sage-processors-demo, and was trained by
examples/train_tiny_classifier.py on the same pictures as the embedded pipelines. Its numbers are called feature-FD,
not FID, and can be compared only with each other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .. import pipelines
from .metrics import Interval, check_images, missing_package


CLASSIFIER = "tiny_classifier"
LABELS = {"shape": 8, "color": 9, "ground_color": 9, "pattern": 4, "size": 3}  # property of a picture -> classes
CLASSIFIER_PIXELS = 64  # side of its input; other pictures are resized
FEATURES = 32  # length of its feature vector
GROUPS = 16  # of the jackknife


class TinyClassifier(nn.Module):
    """Classifier of five properties of a picture, from one vector of 32 features.

    The pictures show one shape on a ground. `forward` takes [N, 3, H, W] in [0, 1] and returns features [N, 32].
    `answers` returns the logits of each property.
    """

    num_features = FEATURES

    def __init__(self):
        super().__init__()
        widths = (3, 24, 48, 64, 64, 96)
        strides = (2, 2, 2, 1, 2)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.SiLU())
                for before, after, stride in zip(widths, widths[1:], strides, strict=False)
            )
        )
        self.features = nn.Linear(2 * widths[-1], FEATURES)
        self.heads = nn.ModuleDict({label: nn.Linear(FEATURES, count) for label, count in LABELS.items()})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        size = (CLASSIFIER_PIXELS, CLASSIFIER_PIXELS)
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=True)
        x = self.blocks(images * 2 - 1)
        # the mean tells how much of something there is, the maximum whether it is there at all
        return self.features(torch.cat([x.mean((2, 3)), x.amax((2, 3))], 1))

    def answers(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {label: logits [N, classes]} for features [N, 32]."""
        return {label: head(F.silu(features)) for label, head in self.heads.items()}


def load_classifier(device: torch.device | str = "cpu") -> TinyClassifier:
    """Load the embedded classifier in fp32 and eval mode.

    Raises: ImportError if safetensors or the classifier is not installed.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise missing_package("feature-FD", "safetensors") from error
    model = TinyClassifier()
    model.load_state_dict(load_file(pipelines.installed_folder(CLASSIFIER) / "model.safetensors"))
    return model.to(device).eval().requires_grad_(False)


def classifier_metrics() -> dict:
    """Return how the embedded classifier was trained, and its accuracy on held-out pictures."""
    found = pipelines.installed_folder(CLASSIFIER) / "metrics.json"
    return json.loads(found.read_text(encoding="utf-8"))


@torch.no_grad()
def features(images: torch.Tensor, model: nn.Module | None = None, *, batch: int = 64) -> torch.Tensor:
    """Return feature vectors of pictures.

    Args:
        images: [N, 3, H, W] floating point in [0, 1], N >= 1.
        model: takes fp32 [n, 3, H, W] in [0, 1] and returns [n, D]; None: the embedded classifier. It runs on the
            device of its parameters.
        batch: pictures per call of the model, >= 1.
    Returns: [N, D] float64 on the CPU.
    Raises: TypeError, ValueError (shape, range, NaN, batch, or a model with NaN or a wrong shape in its output).
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch: got {batch!r}, expected an int of at least 1")
    check_images(images)
    if images.shape[1] != 3:
        raise ValueError(f"images: got {images.shape[1]} channels, expected 3 (RGB)")
    model = load_classifier(images.device) if model is None else model
    parameter = next(model.parameters(), None)
    device = images.device if parameter is None else parameter.device
    found = torch.cat([model(part.to(device, torch.float32)) for part in images.split(batch)]).double().cpu()
    if found.shape[:1] != images.shape[:1] or found.dim() != 2 or not bool(torch.isfinite(found).all()):
        raise ValueError(
            f"model: got an output of shape {tuple(found.shape)} for {len(images)} pictures, or NaN in it; "
            "expected finite [N, D]"
        )
    return found


def frechet_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the squared Fréchet distance between normal distributions fitted to two feature sets.

    |m1 - m2|² + tr C1 + tr C2 - 2 tr (C1^½ C2 C1^½)^½, in fp64, with the means m and covariances C. The last trace is
    the sum of the singular values of A1ᵀ·A2 for any A with A·Aᵀ = C. A is the triangular factor of the centred
    features: so no covariance is formed, and no root is taken of an eigenvalue that is only rounding. The distance of
    equal sets is 0 up to about 1e-15 of their variance.

    Args:
        first [N1, D], second [N2, D]: finite floating point, each with more vectors than D. With fewer, a covariance
            lacks full rank, and the distance says nothing about some directions.
    Returns: float >= 0, in squared units of the features.
    Raises: TypeError, ValueError.
    """
    first, second = (check_features(x, name) for name, x in (("first", first), ("second", second)))
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"second: got vectors of length {second.shape[1]}, expected first's {first.shape[1]}")
    means, factors = [], []
    for x in (first, second):
        mean = x.mean(0)
        means.append(mean)
        factors.append(torch.linalg.qr((x - mean) / (len(x) - 1) ** 0.5, mode="r").R)
    shift = (means[0] - means[1]).square().sum()
    traces = sum(factor.square().sum() for factor in factors)
    # R1ᵀ·R1 = C1, so A1 = R1ᵀ and A1ᵀ·A2 = R1·R2ᵀ
    overlap = torch.linalg.svdvals(factors[0] @ factors[1].T).sum()
    return max((shift + traces - 2 * overlap).item(), 0.0)


def check_features(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return `x` in fp64 on the CPU. Raises: TypeError, ValueError unless it is finite [N, D] with N > D."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name}: got {kind}, expected a floating point tensor [N, D]")
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected [N, D]")
    if len(x) <= x.shape[1]:
        raise ValueError(
            f"{name}: got {len(x)} pictures, expected at least {x.shape[1] + 1}: a covariance of {x.shape[1]} "
            "features needs more pictures than features"
        )
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name}: got NaN or infinity, expected finite features")
    return x.detach().double().cpu()


@dataclass(frozen=True)
class FeatureDistance:
    """A Fréchet distance with its standard error.

    Attributes:
        value: in squared units of the features.
        standard_error: of value, by the grouped jackknife; nan if there are too few pictures to leave a group out.
        excess: value minus the value of the `baseline` pictures, with an interval from differences paired by group;
            None without a baseline.
        images, reference_images: numbers of pictures. features: length of the feature vectors.
    """

    value: float
    standard_error: float
    images: int
    reference_images: int
    features: int
    excess: Interval | None = None

    def __str__(self):
        return f"feature-FD {self.value:.4g} ± {self.standard_error:.2g}"


def distance_of_features(
    found: torch.Tensor,
    reference: torch.Tensor,
    baseline: torch.Tensor | None = None,
    *,
    together: int = 1,
) -> FeatureDistance:
    """Return the Fréchet distance of features with a standard error.

    Args:
        found [N, D], reference [M, D]: features.
        baseline [N, D]: features of other pictures of the same seeds, row by row. The difference to them is known far
            better than either distance.
        together: number of consecutive rows that depend on each other, as the frames of a clip do. The jackknife
            leaves out all of them or none; otherwise the standard error would be too small. At least 1, divides N.
    Returns: FeatureDistance.
    Raises: as `frechet_distance`, and ValueError for a baseline of another shape or a `together` that doesn't fit.
    """
    value = frechet_distance(found, reference)
    if baseline is not None and baseline.shape != found.shape:
        raise ValueError(f"baseline: got shape {tuple(baseline.shape)}, expected {tuple(found.shape)}, row by row")
    if isinstance(together, bool) or not isinstance(together, int) or together < 1 or len(found) % together:
        raise ValueError(f"together: got {together!r}, expected an int of at least 1 that divides {len(found)} rows")
    units = len(found) // together
    keep = _leave_out(units, together) if (units - -(-units // GROUPS)) * together > found.shape[1] else []
    values = torch.tensor(
        [frechet_distance(found[rows], reference) for rows in keep], dtype=torch.float64, device="cpu"
    )
    excess = None
    if baseline is not None:
        other = torch.tensor(
            [frechet_distance(baseline[rows], reference) for rows in keep], dtype=torch.float64, device="cpu"
        )
        difference = value - frechet_distance(baseline, reference)
        spread = 1.96 * _jackknife_error(values - other)
        excess = Interval(difference, difference - spread, difference + spread)
    return FeatureDistance(value, _jackknife_error(values), len(found), len(reference), found.shape[1], excess)


def _leave_out(units: int, together: int = 1) -> list[torch.Tensor]:
    """Row masks that each leave one of GROUPS interleaved groups of units of `together` rows out."""
    group = torch.arange(units, device="cpu").repeat_interleave(together) % GROUPS
    return [group != g for g in range(min(GROUPS, units))]


def _jackknife_error(values: torch.Tensor) -> float:
    """Return the jackknife's standard error from values with one group left out each; nan without values."""
    if values.numel() == 0:
        return float("nan")
    n = values.numel()
    return ((n - 1) / n * (values - values.mean()).square().sum()).sqrt().item()


def feature_fd(
    images: torch.Tensor,
    reference: torch.Tensor,
    baseline: torch.Tensor | None = None,
    *,
    model: nn.Module | None = None,
    batch: int = 64,
) -> FeatureDistance:
    """Return the Fréchet distance of pictures on the embedded classifier's features.

    It is not FID and can't be compared with FID.

    Args:
        images [N, 3, H, W], reference [M, 3, H, W]: floating point in [0, 1]; N and M above 32, the number of
        features.
        baseline: [N, 3, H, W], pictures of the same prompts and seeds drawn another way. With it, the result has
            `excess`, the distance of `images` minus that of the baseline.
        model, batch: as for `features`.
    Raises: TypeError, ValueError, ImportError without safetensors.
    """
    model = load_classifier(images.device if isinstance(images, torch.Tensor) else "cpu") if model is None else model
    found, other = features(images, model, batch=batch), features(reference, model, batch=batch)
    base = None if baseline is None else features(baseline, model, batch=batch)
    return distance_of_features(found, other, base)
