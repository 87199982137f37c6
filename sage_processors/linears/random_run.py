"""A run of a language model on random tokens, for the sizes of its channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


TOKENS = 256
_COST = ", which costs some percent of a language model's perplexity"


class RunFailed(Exception):
    """Raised by a run on random tokens whose model failed, with the model's error as its cause."""


def unmeasured(model: Any, reason: str) -> str:
    """Return the sentence for the log and the report that no run measured activations, and why."""
    is_language_model = _takes_tokens(model) and model.get_output_embeddings() is not None  # CLIP takes tokens, too
    cost = _COST if is_language_model else ""
    return f"Linear layers are balanced by their weights alone{cost}, as {reason}."


def random_run(model: Any) -> Callable[[], object] | str:
    """Return a function that runs the model on random tokens, always the same ones.

    Returns: the function, which raises RunFailed, or in words why the model can't be run so.
    """
    config = model.config.get_text_config(decoder=True)
    devices = {parameter.device for parameter in model.parameters()}
    if model.training:
        return "the model is in training mode: call model.eval() first"
    if not _takes_tokens(model):
        return "the model takes other inputs than the ids of tokens"
    if model.config.is_encoder_decoder:
        return "the model is an encoder with a decoder, which random tokens don't serve"
    device = devices.pop() if len(devices) == 1 else torch.device("meta")
    if device.type == "meta" or (device.type == "cpu" and torch.cuda.is_available()):
        return "the model is not on the device that it will run on: load or apply it there"
    tokens = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    if isinstance(config.bos_token_id, int) and 0 <= config.bos_token_id < config.vocab_size:
        ids[0, 0] = config.bos_token_id
    ids = ids.to(device)

    def run() -> object:
        try:
            return model(input_ids=ids, use_cache=False)
        except Exception as error:  # of a model that wants other inputs, or of too little memory
            raise RunFailed(f"a run on random tokens failed ({type(error).__name__}: {error})") from error

    return run


def _takes_tokens(model: Any) -> bool:
    return getattr(model, "main_input_name", "") == "input_ids"
