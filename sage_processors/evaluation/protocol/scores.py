"""Scores of single pictures by a model: CLIP, and the share of the writing that OCR reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch

from ...installation import pip_install
from ..metrics import missing_package


WRITING = re.compile(r'"([^"]+)"')  # a prompt's words that the picture is to show


def usable(name: str, measure: Callable[[], Any]) -> str:
    """Return why a metric can't be used here, "" if it can."""
    try:
        measure()
    except (ImportError, OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        return said if said.startswith(name) else f"{name}: {said}"
    return ""


class ClipScore:
    """Cosine of CLIP's embeddings of pictures and prompts, times 100.

    name: a folder, or a Hub name in the local cache: nothing is downloaded. Raises: OSError or ValueError without it.
    """

    def __init__(self, name: str, device: torch.device):
        from transformers import AutoProcessor, CLIPModel

        self.name = name
        self.model = CLIPModel.from_pretrained(name, local_files_only=True, use_safetensors=True).to(device).eval()
        self.processor = AutoProcessor.from_pretrained(name, local_files_only=True)

    @torch.no_grad()
    def __call__(self, pictures: torch.Tensor, prompts: Sequence[str]) -> list[float]:
        """Return one score for each picture [N, 3, H, W] in [0, 1] and its prompt."""
        given = self.processor(
            text=list(prompts),
            images=list(pictures),
            return_tensors="pt",
            padding=True,
            truncation=True,
            do_rescale=False,
        )
        found = self.model(**given.to(self.model.device))
        scores: list[float] = (found.image_embeds * found.text_embeds).sum(-1).mul(100).tolist()
        return scores


class Legibility:
    """Share of the letters in a prompt's quotation marks that OCR reads in its picture, in their order.

    Models are those in the package, nothing is downloaded. Raises: ImportError without rapidocr.
    """

    def __init__(self) -> None:
        try:
            import onnxruntime  # noqa: F401
            from rapidocr import RapidOCR
        except ImportError as error:
            raise missing_package("reading a picture", str(error.name), pip_install("ocr")) from error
        self.read = RapidOCR(params={"Global.log_level": "critical"})

    def __call__(self, pictures: torch.Tensor, prompts: Sequence[str]) -> list[float | None]:
        """Return a share for each picture [N, 3, H, W] in [0, 1]; None for a prompt without writing."""
        pixels = (
            (pictures.clamp(0, 1) * 255).round().to("cpu", torch.uint8).permute(0, 2, 3, 1).flip(-1).numpy()
        )  # BGR
        return [
            share_read(wanted, " ".join(self.read(x).txts or ())) if (wanted := writing(prompt)) else None
            for x, prompt in zip(pixels, prompts, strict=True)
        ]


def writing(prompt: str) -> str:
    """Return the words between a prompt's quotation marks."""
    return " ".join(WRITING.findall(prompt))


def share_read(wanted: str, found: str) -> float:
    """Return the share of the letters and digits of `wanted` that `found` has in the same order."""
    letters, read = ("".join(filter(str.isalnum, text.casefold())) for text in (wanted, found))
    blocks = SequenceMatcher(None, letters, read, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / len(letters) if letters else 0.0
