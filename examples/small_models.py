"""Small models of transformers for the examples, offline: the trained tiny_lm, and a vision encoder of random weights.

Each returns what `CommandLine.loading` takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers

from sage_processors.evaluation import language


@dataclass
class WithProcessor:
    """A vision model and what prepares its pictures, saved into one folder."""

    model: transformers.PreTrainedModel
    processor: transformers.CLIPImageProcessor

    def save_pretrained(self, folder: str) -> None:
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)


def llama():
    return language.locate("tiny_lm"), {}


def vision():
    """257 tokens: 16 x 16 patches and one for the picture as a whole."""
    config = transformers.CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=128,
        patch_size=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.CLIPVisionModel(config).eval()
    size = {"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}}
    return WithProcessor(model, transformers.CLIPImageProcessorPil(**size)), {}
