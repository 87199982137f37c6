"""SageConfig, the `quantization_config` of both libraries. Imports neither of them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from ..files.strict_json import strict_object
from ..option_checks import one_of, whole, with_known_options
from ..option_groups import LINEARS, LayerOptions, LinearFormat
from ..version import __version__


FORMAT_VERSION = 2  # 1 had no "gated", and its layers ran as with "8bit"
Gated = Literal["8bit", "16bit"]
STORED = (*LINEARS[1:], "int8_weights")  # formats of single layers in a folder
_SAVE_AGAIN = "load the 16-bit model with sp.SageConfig and save it again"
_FIELDS = {
    "quant_method": str,
    "format_version": int,
    "package_version": str,
    "format": str,
    "layers": list,
    "modules": dict,
    "balanced": list,
}


class Method(str, Enum):
    """Name of this quantisation method in config.json: the package that has to be imported to read it."""

    SAGE = "sage_processors"


@with_known_options
class SageConfig:
    """A `quantization_config` of `from_pretrained` that loads linear layers straight into 8 bit.

    The weights are quantised as the files are read, and the 16-bit ones are never in memory together.
    `save_pretrained` writes the 8-bit weights, and `from_pretrained` of that folder reads them, if `sage_processors`
    was imported before.

    Args:
        format: "int8" or "fp8", for the layers that `Linears(format, drop_weights=True)` chooses.
        layers: {name pattern: format}, or {name pattern: {"linears": format}} as in `SageAttnProcessor.layers`. The
            first match counts, also for protected and small layers. Patterns are fnmatch patterns of the names in the
            model that is loaded.
        min_features: as in `Linears`.
        gated: "16bit": layers behind a gated activation, such as SwiGLU's down_proj, keep activations in 16 bit in
            calls of many rows, unless `layers` names them. "8bit": they run as all others. None: "16bit" in models of
            transformers, as in `sage_processors.apply`, and "8bit" in those of diffusers.
    Attributes:
        modules: {name: format} of the layers that are in 8 bit, once a model is loaded. balanced: names of those whose
            input has a balance.
    Raises: TypeError or ValueError for a wrong type or value.
    """

    quant_method = Method.SAGE

    def __init__(
        self,
        format: LinearFormat = "int8",
        *,
        layers: Mapping[str, LinearFormat | LayerOptions] | Sequence[tuple[str, LinearFormat]] = (),
        min_features: int | None = None,
        gated: Gated | None = None,
    ) -> None:
        one_of("format", format, LINEARS)
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise TypeError(f"layers: got {layers!r}, expected {{name pattern: format}}")
        if min_features is not None:
            whole("min_features", min_features, 0)
        if gated is not None:
            one_of("gated", gated, ("8bit", "16bit"))
        pairs = layers.items() if isinstance(layers, Mapping) else layers
        self.format, self.min_features, self.gated = format, min_features, gated
        self.layers = tuple(_rule(pair) for pair in pairs)
        self.modules: dict[str, str] = {}
        self.balanced: list[str] = []

    @classmethod
    def from_dict(cls, values: dict[str, Any], return_unused_kwargs: bool = False, **unused: Any) -> Any:
        """Return the config that a config.json has. Raises: ValueError for a newer version or a damaged entry."""
        version = values.get("format_version")
        if type(version) is int and version > FORMAT_VERSION:
            raise ValueError(
                f"quantization_config: got format_version {version}, expected at most {FORMAT_VERSION}; install "
                f"sage_processors {str(values.get('package_version'))[:40]}, which wrote the folder, or a newer one"
            )
        if version == 1:
            values = values | {"gated": "8bit"}
        fields = _FIELDS | {name: type(values.get(name)) for name in ("min_features", "gated")}  # checked below
        strict_object(values, fields, "quantization_config", _SAVE_AGAIN)
        made = cls(
            values["format"],
            layers=[tuple(pair) for pair in values["layers"]],
            min_features=values["min_features"],
            gated=values["gated"],
        )
        for name, format in values["modules"].items():
            if format not in STORED:
                raise ValueError(
                    f"quantization_config: got format {str(format)[:50]!r} of layer {name[:200]!r}, expected one of "
                    f"{list(STORED)}; {_SAVE_AGAIN}"
                )
        for name in values["balanced"]:
            if not isinstance(name, str) or name not in values["modules"] or values["balanced"].count(name) > 1:
                raise ValueError(
                    f"quantization_config: got balance of {str(name)[:200]!r}, expected one 8-bit layer "
                    f"each; {_SAVE_AGAIN}"
                )
        made.modules, made.balanced = dict(values["modules"]), list(values["balanced"])
        return (made, unused) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json gets."""
        return {
            "quant_method": self.quant_method.value,
            "format_version": FORMAT_VERSION,
            "package_version": __version__,
            "format": self.format,
            "layers": [list(pair) for pair in self.layers],
            "min_features": self.min_features,
            "gated": self.gated,
            "modules": dict(self.modules),
            "balanced": list(self.balanced),
        }

    to_diff_dict = to_dict

    def of_model(self) -> SageConfig:
        """Return a copy for one model: its `modules` are that model's own."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        rules = f", layers={dict(self.layers)}" if self.layers else ""
        least = "" if self.min_features is None else f", min_features={self.min_features}"
        gated = "" if self.gated is None else f", gated={self.gated!r}"
        return f"SageConfig({self.format!r}{rules}{least}{gated})"


def _rule(pair: Any) -> tuple[str, str]:
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
        raise TypeError(f"layers: got {pair!r}, expected {{name pattern: format}}")
    pattern, format = pair
    if isinstance(format, Mapping):
        if set(format) != {"linears"}:
            raise ValueError(
                f"layers[{pattern!r}]: got {sorted(format)}, expected 'linears' alone: attention's options "
                "belong to SageAttnProcessor"
            )
        format = format["linears"]
    one_of(f"layers[{pattern!r}]", format, LINEARS)
    return pattern, format
