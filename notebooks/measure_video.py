"""Draw clips with stock attention and every recipe x scaling, and write a table of their quality.

    python notebooks/measure_video.py --device cuda --clips 64 --steps 25 --batch 16 --work measured_video
    python notebooks/measure_video.py --device cuda --size long --clips 64 --batch 4 --work measured_video
    … --minutes 9                                                          # stop in time; the same command continues

The notebook video.py shows the table. Works like measure.py, with the metrics of clips and the number of obeyed
prompts. Prompts and true clips are drawn from one distribution (examples/tiny_videos.py). It needs the weights of
tiny_wan.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import measure
import tiny_videos
import torch
import video_report
from picture_report import Row
from tiny_video_check import obeyed
from video_report import Clips

from sage_kernels import RECIPES
from sage_kernels.results import check_appendable
from sage_processors import pipelines
from sage_processors.evaluation import videos
from sage_processors.evaluation.feature_distance import load_classifier
from sage_processors.evaluation.metrics import mean_interval
from sage_processors.files.whole_file import check_output


NAME = "tiny_wan"
TABLE = measure.HERE / "data" / "videos.csv"
# arguments of the pipeline's call, over its own: the clips it was trained on most, and the largest, 4,352 tokens
SIZES: dict[str, dict[str, int]] = {"small": {}, "long": {"height": 128, "width": 128, "num_frames": 33}}
TRUE_CLIPS = 128


def scenes(count: int, seed: int = measure.SCENE_SEED) -> tiny_videos.Scene:
    """Return the scenes of the prompts, the same for every variant. Another count gives other scenes."""
    return tiny_videos.sample_scene(count, torch.device("cpu"), torch.Generator().manual_seed(seed))


def true_features(size: dict[str, Any], model) -> torch.Tensor:
    """Return features, fp64 [frames, 32], of drawn clips with the prompts' distribution of scenes."""
    generator = torch.Generator().manual_seed(measure.SCENE_SEED + 1)
    found = []
    for _ in range(0, TRUE_CLIPS, 8):
        scene = tiny_videos.sample_scene(8, torch.device("cpu"), generator)
        clips = tiny_videos.draw(scene, size["height"], size["num_frames"], generator)
        found.append(videos.frame_features(clips.transpose(1, 2) * 0.5 + 0.5, model))
    return torch.cat(found)


class ClipMeasurement(measure.Measurement):
    """Measurement of all variants at one size of clips, batch by batch.

    Args: size: of SIZES. count: clips, steps, clips per call. folder: of the chunks. source: folder of the pipeline;
        None: tiny_wan's.
    """

    kind = Clips

    def __init__(self, size: str, count: measure.Size, device: str, folder: Path, source: Path | None = None):
        self.clip, self.source, self.scene = size, source, scenes(count.images)
        words = tiny_videos.captions()
        texts = [words[i] for i in self.scene.caption_index().tolist()]
        super().__init__(f"{NAME}_{size}", count, device, folder, texts)

    def loaded(self) -> tuple[Any, dict]:
        arguments = pipelines.call_arguments(NAME) | SIZES[self.clip]
        return measure.load(self.source or NAME, self.device), arguments

    def obeyed(self, clips: torch.Tensor, rows: range) -> torch.Tensor:
        """Return 1 for each clip [N, T, 3, H, W] in [0, 1] that shows its prompt, else 0, as fp64 [N]."""
        answers = obeyed(clips.transpose(1, 2) * 2 - 1, self.scene[list(rows)])["all"]
        return torch.tensor(answers, dtype=torch.float64)

    def kept(self, label: str, images: torch.Tensor, stock: torch.Tensor, index: int) -> dict:
        on = self.device
        compared = super().kept(label, images.to(on), stock.to(on), index)
        return {**compared, "obeyed": self.obeyed(images, self.batches[index])}

    def rows(self, recipe: str, names: list[str], real: torch.Tensor) -> list[dict]:
        """Return the finished table, one dict of measure.COLUMNS per number."""
        stock = [self.stock(i) for i in range(len(self.batches))]
        change = torch.cat([videos.frame_change(clips) for clips in stock])
        features = torch.cat([videos.frame_features(clips, self.model) for clips in stock])
        found = video_report.report(self.sets(names), change, features, real)
        kept = {name: torch.cat([chunk["obeyed"] for chunk in self._chunks(name)]) for name in names}
        kept["stock"] = torch.cat([self.obeyed(c, rows) for c, rows in zip(stock, self.batches, strict=True)])
        found += [Row(name, "obeyed_mean", "1", *mean_interval(kept[name]), len(change)) for name in ("stock", *names)]
        return self._table(found, recipe)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--recipe", choices=sorted(RECIPES), action="append", help="may be repeated; default: all")
    parser.add_argument("--variant", action="append", help="may be repeated; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clips", type=int, default=64)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this; the same command goes on")
    parser.add_argument("--work", type=Path, required=True, help="folder of the unfinished parts")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table")
    parser.add_argument("--csv", type=Path, help="results.csv to append the table to as well")
    arguments = parser.parse_args()
    check_output(arguments.out, "--out")
    if arguments.csv:
        check_appendable(arguments.csv)
    deadline = time.monotonic() + 60 * arguments.minutes
    count = measure.Size(arguments.clips, arguments.steps, arguments.batch)
    real = true_features(pipelines.call_arguments(NAME) | SIZES[arguments.size], load_classifier())
    unfinished, table = 0, []
    for recipe in arguments.recipe or sorted(name for name, recipe in RECIPES.items() if not recipe.study):
        measurement = ClipMeasurement(arguments.size, count, arguments.device, arguments.work / recipe)
        label = f"{arguments.size} {recipe}"
        done, missing = measure.run_variants(measurement, label, recipe, arguments.variant, deadline)
        unfinished += missing
        if done and not unfinished:
            table += measurement.rows(recipe, done, real)
    return measure.finish(table, unfinished, arguments.out, arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
