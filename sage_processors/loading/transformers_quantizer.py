"""The quantizer of transformers models with a SageConfig."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers.core_model_loading import ConversionOps
from transformers.quantizers.base import HfQuantizer

from .config import SageConfig
from .files import Renaming, as_named, check_files
from .layers import QuantizedHere, ReadyMade, need_accelerate, noted, refuse_offload
from .measured import balance_by_run


OFFLOAD = "accelerate.cpu_offload_with_hook(model)"


class SageQuantizer(HfQuantizer):
    """Loads and saves a transformers model whose linear layers are in 8 bit."""

    is_trainable = False
    is_compileable = True
    quantized_element_size = 1

    def __init__(self, quantization_config: SageConfig, **options: Any) -> None:
        super().__init__(quantization_config.of_model(), **options)
        self._layers: Any = None
        self._files: list[Any] = []
        self._model: Any = None
        self._renaming: Renaming | None = as_named

    def validate_environment(self, *args: Any, device_map: Any = None, **options: Any) -> None:
        """Refuse what can't be loaded before anything is read. Raises: ImportError, ValueError."""
        need_accelerate()
        refuse_offload(device_map, OFFLOAD)

    def is_serializable(self) -> bool:
        """Return True: save_pretrained writes the 8-bit weights."""
        return True

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        """Return True for a 16-bit weight that is quantised as it arrives."""
        return not self.pre_quantized and self._layers is not None and param_name in self._layers

    def get_quantize_ops(self) -> ConversionOps:
        """Return the operation that takes an arriving weight."""
        return _Put(self._layers)

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **options: Any) -> None:
        if self.pre_quantized:
            self._layers = ReadyMade(model, self.quantization_config)
        else:
            self._layers = QuantizedHere(model, self.quantization_config, "16bit")
        self._files, self._model = list(checkpoint_files or []), model

    def update_weight_conversions(self, weight_conversions: Any, *args: Any) -> Any:
        """Check the files of the checkpoint before weights are read, and return the conversions.

        transformers tells here how it will rename what is in the files: folders of many models (llava, ViT) are saved
        under the names of their first checkpoint, not of the module.
        """
        conversions = super().update_weight_conversions(weight_conversions, *args)
        if self._model is not None:  # other libraries ask for the conversions of a loaded model
            self._renaming = _renaming(self._model, conversions)
            expected, absent = (self._layers.expected, self._layers.absent) if self.pre_quantized else ({}, ())
            check_files(self._files, expected, self._renaming, absent)
            self._model = None
        return conversions

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        refuse_offload(getattr(model, "hf_device_map", None), OFFLOAD)
        swap = self._layers.finish()
        if not self.pre_quantized:
            balance_by_run(swap, self._files, self._renaming or as_named)
            noted(swap, self.quantization_config)
        self._layers, self._files, self._model, self._renaming = None, [], None, as_named
        model.config.quantization_config = self.quantization_config
        return model


def _renaming(model: Any, conversions: list[Any]) -> Renaming | None:
    """Return the `Renaming` that transformers uses for this model.

    None where this version of transformers can't be asked.
    """
    try:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return None
    conversions = deepcopy(conversions)  # each notes that it was used
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix, known = model.base_model_prefix, dict.fromkeys(model.state_dict(), True)

    def renamed(raw: str) -> tuple[list[str], bool]:
        name, pattern = rename_source_key(raw, renamings, converters, prefix, known)
        if name not in known and raw in known:
            name, pattern = rename_source_key(raw, [], [], prefix, known)
        if pattern is None:
            return [name], True
        targets = next(each.target_patterns for each in converters if pattern in each.source_patterns)
        return [name.replace(targets[0], target) for target in targets], False

    return renamed


class _Put(ConversionOps):
    def __init__(self, layers: QuantizedHere) -> None:
        self._layers = layers

    def convert(
        self, input_dict: Any, *, full_layer_name: str, missing_keys: Any = None, **options: Any
    ) -> dict[str, Any]:
        for value in input_dict.values():
            self._layers.put(full_layer_name, value[0] if isinstance(value, list) else value)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}
