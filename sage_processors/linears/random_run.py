"""A run of a language model on random tokens, for the sizes of its channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


TOKENS = 256
UNMEASURED = (
    "Linear layers are balanced by their weights alone, which costs some percent of perplexity, as the model can't be "
    "run on random tokens here. Load or apply it on the device that it will run on."
)


def random_run(model: Any) -> Callable[[], object] | None:
    """Return a function that runs the model on random tokens of a fixed seed, or None.

    None where the input is more than token ids, or where weights are not on the device that the model is to run on.
    """
    config = model.config.get_text_config(decoder=True)
    devices = {parameter.device for parameter in model.parameters()}
    if getattr(model, "main_input_name", "") != "input_ids" or model.config.is_encoder_decoder or model.training:
        return None
    device = devices.pop() if len(devices) == 1 else torch.device("meta")
    if device.type == "meta" or (device.type == "cpu" and torch.cuda.is_available()):
        return None
    tokens = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    ids = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    if isinstance(config.bos_token_id, int) and 0 <= config.bos_token_id < config.vocab_size:
        ids[0, 0] = config.bos_token_id
    ids = ids.to(device)
    return lambda: model(input_ids=ids, use_cache=False)
