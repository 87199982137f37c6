"""Load language models to measure, and held-out text for the embedded one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import pipelines
from ..installation import pip_install


EMBEDDED_NAME = "tiny_lm"
EMBEDDED = pipelines.folder(EMBEDDED_NAME)
KINDS = ("topics", "docs", "code", "dialogues")  # of the held-out text that comes with the embedded model


def load(
    model: str | Path = EMBEDDED_NAME,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    encoder: bool = False,
):
    """Load a causal language model, or a sentence encoder, in evaluation mode, and its tokenizer.

    Args:
        model: "tiny_lm", the embedded one; or a folder or a name on the Hub, for AutoModelForCausalLM. Its weights
            must be safetensors: a .bin is a pickle, which can run code.
        device: of the model. dtype: of its weights; None: fp32 on the CPU, bf16 elsewhere.
        encoder: load a model without a head, which returns hidden states.
    Returns: (model, tokenizer).
    Raises: ImportError if transformers or the embedded model is not installed; OSError or ValueError if there is no
        such model.
    """
    tokenizer = load_tokenizer(model)
    from transformers import AutoModel, AutoModelForCausalLM

    source, device = locate(model), torch.device(device)
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    kind = AutoModel if encoder else AutoModelForCausalLM
    found = kind.from_pretrained(source, dtype=dtype, use_safetensors=True)
    return found.to(device).eval(), tokenizer


def load_tokenizer(model: str | Path) -> Any:
    """Load the tokenizer of a model, named as for `load`."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"language models need transformers: {pip_install('transformers')}") from error
    return AutoTokenizer.from_pretrained(locate(model))


def locate(model: str | Path) -> str | Path:
    """Return the embedded model's folder for its name, and any other name or folder unchanged.

    Raises: ImportError, naming the pip command, if the embedded model is not installed.
    """
    return pipelines.installed_folder(EMBEDDED_NAME) if model == EMBEDDED_NAME else model


def chat_ids(tokenizer, said: str | list[dict]) -> torch.Tensor:
    """Return the token ids of a prompt for the next answer, made by the tokenizer's chat template.

    Args:
        tokenizer: of a language model. Without a chat template, the prompt is the texts, a line each.
        said: a question, or a conversation of {"role": "user" or "assistant", "content": text}.
    Returns: int64 [1, S].
    """
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if tokenizer.chat_template is None:
        lines = "\n".join(message["content"] for message in messages)
        return tokenizer(lines, return_tensors="pt").input_ids
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer.apply_chat_template(messages, **options)["input_ids"]


def heldout_windows(
    tokenizer,
    length: int,
    *,
    count: int | None = None,
    kinds: Sequence[str] = KINDS,
    chat: bool = False,
    folder: str | Path | None = None,
) -> torch.Tensor:
    """Return non-overlapping windows of text that the embedded model was not trained on.

    Args:
        tokenizer: of any language model. If it puts a token in front of a text (<bos>), every window begins with it.
            Documents end with its end-of-text token.
        length: tokens per window, >= 2.
        count: number of windows, evenly spread over the text; None: all.
        kinds: of KINDS. "topics", "docs" and "code" are Python's (PSF licence), "dialogues" are made up.
        chat: write dialogues in the tokenizer's own chat template. If False, they are plain text, a line for each
            message. For the embedded model they are always in its own markup, which it was trained on.
        folder: of heldout.json; None: the embedded model's.
    Returns: int64 [count, length].
    Raises: ValueError for an unknown kind, `chat` with a tokenizer without a chat template, or too little text;
        ImportError if the embedded model is not installed.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown or not kinds:
        raise ValueError(f"kinds: got {list(kinds)}, expected some of {list(KINDS)}")
    before = _before_a_text(tokenizer)
    if length < 2 + len(before):
        raise ValueError(f"length: got {length}, expected at least {2 + len(before)} tokens")
    if chat and tokenizer.chat_template is None:
        raise ValueError("chat: got True and a tokenizer without a chat template, expected False")
    home = pipelines.installed_folder(EMBEDDED_NAME) if folder is None else Path(folder)
    documents = json.loads((home / "heldout.json").read_text())
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts, own = [], length - len(before)
    for kind in kinds:
        texts = [document["text"] for document in documents if document["kind"] == kind]
        if kind == "dialogues":
            texts = [_dialogue(tokenizer, text, chat) for text in texts]
        rows = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        stream = torch.tensor([token for row in rows for token in (*row, *end)], dtype=torch.int64, device="cpu")
        parts.append(stream[: len(stream) // own * own].view(-1, own))
    windows = torch.cat(parts)
    wanted = len(windows) if count is None else count
    if not 1 <= wanted <= len(windows):
        raise ValueError(f"count: got {wanted}, expected 1 to {len(windows)} windows of {length} tokens of {kinds}")
    windows = windows[torch.arange(wanted, device="cpu") * len(windows) // wanted]
    in_front = torch.tensor(before, dtype=torch.int64, device="cpu").expand(wanted, -1)
    return torch.cat([in_front, windows], 1)


def _before_a_text(tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer puts in front of a text."""
    whole, bare = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(bare)] == bare), [])


def _dialogue(tokenizer, text: str, chat: bool) -> str:
    """Rewrite a dialogue, which has the embedded model's markup, for a tokenizer.

    If the tokenizer is the embedded model's, the dialogue stays as it is.
    """
    said = re.split(r"<\|(user|assistant)\|>", text)[1:]
    messages = [
        {"role": role, "content": content.removesuffix("<|end|>")}
        for role, content in zip(said[::2], said[1::2], strict=True)
    ]
    may_be_own = tokenizer.chat_template is not None and "<|user|>" in tokenizer.get_added_vocab()
    if chat or may_be_own:
        written: str = tokenizer.apply_chat_template(messages, tokenize=False)
        if chat or written.removesuffix("<|end|>") == text:
            return written.removesuffix("<|end|>")
    return "\n".join(message["content"] for message in messages)
