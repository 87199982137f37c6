"""Train the classifier behind feature-FD on drawn pictures, and write its weights and its record beside them.

    OMP_NUM_THREADS=1 python examples/train_tiny_classifier.py

The same command on the same machine and torch gives the same file, bit for bit: one thread, seeded drawing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import tiny_data
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from sage_processors import pipelines
from sage_processors.evaluation.feature_distance import CLASSIFIER, CLASSIFIER_PIXELS, LABELS, TinyClassifier


PEAK_RATE = 2e-3
HELD_OUT_SEED = 2**31  # training draws from seed 0 on


def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Pictures [count, 3, 64, 64] in [0, 1] and what they show, {label: int64 [count]}."""
    scene = tiny_data.sample_scene(count, torch.device("cpu"), generator)
    pictures = tiny_data.draw(scene, CLASSIFIER_PIXELS, generator) * 0.5 + 0.5
    return pictures, {label: getattr(scene, label) for label in LABELS}


@torch.no_grad()
def accuracy(model: TinyClassifier, count: int) -> dict[str, float]:
    """Share of right answers per label on `count` pictures that training never drew."""
    pictures, labels = draw(count, torch.Generator().manual_seed(HELD_OUT_SEED))
    found = model.answers(torch.cat([model(part) for part in pictures.split(256)]))
    return {label: round((found[label].argmax(1) == labels[label]).double().mean().item(), 4) for label in LABELS}


def train(steps: int, batch: int, seed: int) -> TinyClassifier:
    """A classifier after `steps` batches of new pictures; the learning rate falls along a half cosine."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = TinyClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        pictures, labels = draw(batch, generator)
        logits = model.answers(model(pictures))
        loss = sum(F.cross_entropy(logits[label], labels[label]) for label in LABELS)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}/{steps}: loss {loss.item():.3f}", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=4096, help="pictures to test on")
    parser.add_argument("--output", type=Path, default=pipelines.folder(CLASSIFIER), help="folder for the two files")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    start = time.monotonic()
    model = train(arguments.steps, arguments.batch, arguments.seed)
    record = {
        "what": "classifier behind feature-FD, trained by examples/train_tiny_classifier.py on pictures it draws",
        "steps": arguments.steps,
        "batch": arguments.batch,
        "seed": arguments.seed,
        "pixels": CLASSIFIER_PIXELS,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "held_out_pictures": arguments.held_out,
        "held_out_accuracy": accuracy(model, arguments.held_out),
        "seconds": round(time.monotonic() - start),
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, arguments.output / "model.safetensors")
    (arguments.output / "metrics.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
