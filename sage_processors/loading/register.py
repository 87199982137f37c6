"""Make SageConfig known to diffusers and transformers when they are imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ..patching.on_import import when_imported
from .config import Method, SageConfig


def _meet(library: str) -> None:
    auto: Any = sys.modules[f"{library}.quantizers.auto"]

    def quantizer(quantization_config: SageConfig, **options: Any) -> Any:
        module = importlib.import_module(f"{__package__}.{library}_quantizer")
        return module.SageQuantizer(quantization_config, **options)

    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[Method.SAGE.value] = SageConfig
    auto.AUTO_QUANTIZER_MAPPING[Method.SAGE.value] = quantizer


def _meet_diffusers() -> None:
    _meet("diffusers")


def _meet_transformers() -> None:
    _meet("transformers")


def register() -> None:
    """Register SageConfig with both libraries: now, or as soon as they are imported."""
    when_imported("diffusers.quantizers.auto", _meet_diffusers, ready="DiffusersAutoQuantizer")
    when_imported("transformers.quantizers.auto", _meet_transformers, ready="get_hf_quantizer")
