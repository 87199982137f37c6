"""The quantizer of diffusers models with a SageConfig."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import nn

from .config import SageConfig
from .files import check_files
from .layers import QuantizedHere, ReadyMade, need_accelerate, refuse_offload


class SageQuantizer(DiffusersQuantizer):
    """Loads and saves a diffusers model whose linear layers are in 8 bit."""

    use_keep_in_fp32_modules = True
    supports_parallel_loading = False  # weights of one block are decided on together
    is_serializable = True
    is_trainable = False
    is_compileable = True

    def __init__(self, quantization_config: SageConfig, **options: Any) -> None:
        super().__init__(quantization_config.of_model(), **options)
        self._files: list[Any] = []
        self._layers: Any = None

    def validate_environment(self, *args: Any, device_map: Any = None, **options: Any) -> None:
        """Refuse what can't be loaded before anything is read. Raises: ImportError, ValueError."""
        need_accelerate()
        refuse_offload(device_map, "pipe.enable_model_cpu_offload()")

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of what stays in 16 or 32 bit: fp32 without a torch_dtype, as without quantisation."""
        return torch.float32 if torch_dtype is None else torch_dtype

    def adjust_target_dtype(self, torch_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype by which a device_map of "auto" counts the bytes of weights."""
        return torch.int8

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[Any]) -> list[str]:
        """Remember the files, whose headers are checked when the model is there."""
        self._files = [file for file in checkpoint_files if not isinstance(file, dict)]
        return loaded_keys

    def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
        kind = ReadyMade if self.pre_quantized else QuantizedHere
        self._layers = kind(model, self.quantization_config)
        check_files(self._files, self._layers.expected if self.pre_quantized else {})

    def check_if_quantized_param(
        self, model: Any, param_value: Any, param_name: str, *args: Any, **options: Any
    ) -> bool:
        """Return True: all tensors are taken here, so that none keeps its file in memory."""
        return True

    def create_quantized_param(
        self,
        model: Any,
        param_value: torch.Tensor,
        param_name: str,
        target_device: Any,
        state_dict: dict[str, torch.Tensor],
        *args: Any,
        **options: Any,
    ) -> None:
        """Put a tensor of a file into the model: in 8 bit, or as it is."""
        device = torch.device(target_device)
        if self.pre_quantized and param_name in self._layers.expected:
            param_value = state_dict[param_name]  # before diffusers cast it to torch_dtype: scales are fp32
        if not self.pre_quantized and param_name in self._layers:
            self._layers.put(param_name, param_value.to(device))
            return
        path, _, name = param_name.rpartition(".")
        module = model.get_submodule(path)
        value = param_value.clone() if param_value.device == device else param_value.to(device)
        if name in module._parameters:
            module._parameters[name] = nn.Parameter(value, requires_grad=module._parameters[name].requires_grad)
        else:
            module._buffers[name] = value

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        self._layers.finish()
        self._layers, self._files = None, []
        model.register_to_config(quantization_config=self.quantization_config)
        return model
