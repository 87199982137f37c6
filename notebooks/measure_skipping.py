"""Measure skipped key tiles on tiny_wan's largest clips, with several limits and as calibrate chooses.

    python notebooks/measure_skipping.py --device cuda --clips 64 --steps 25 --work measured_skipping
    … --compensate --out compensated.csv                     what is left out stands in the softmax as its mean
    … --part switched                 beside the one above, so that it finds this part done
    … --device cpu --size small --clips 4 --steps 6 --batch 2 --search 2 --work probe --out probe.csv

The notebook video.py shows the table. Clips are those of measure_video.py. "dense" skips nothing. "calibrated" has the
options of `sp.calibrate` for a target of LOSS_DB below dense, found on other prompts and written as a policy to the
work folder. Rows "promised_…" are its own measurements, on as many fresh prompts as it searched with.
The same variants are also drawn with prompts that change in the middle of a run, so that the measurements of earlier
steps are no longer true. All numbers are relative to stock attention with the same prompts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import measure
import measure_video
import tiny_videos
import torch
from picture_report import Row

import sage_processors as sp
from sage_kernels import DEFAULT_RECIPE
from sage_processors import pipelines
from sage_processors.evaluation import quality
from sage_processors.evaluation.feature_distance import load_classifier
from sage_processors.evaluation.metrics import mean_interval
from sage_processors.files.whole_file import check_output


LIMITS = (0.003, 0.01, 0.03, 0.1, 0.3)
LOSS_DB = 3.0
SEARCH_SEED = 78  # of the prompts for calibrate
SWITCH_AT = 850.0  # timestep (of 1000) below which every clip of a batch gets its neighbour's prompt


def options(**fields) -> sp.SageAttnProcessor:
    return sp.SageAttnProcessor(recipe=DEFAULT_RECIPE, min_tokens=quality.MIN_TOKENS, **fields)


class SkipMeasurement(measure_video.ClipMeasurement):
    """Measurement of clips and of their skipped tiles. switched: prompts change in the middle of a run."""

    def __init__(self, size: str, count: measure.Size, device: str, folder: Path, switched: bool):
        super().__init__(size, count, device, folder / ("switched" if switched else "steady"))
        self.switched = switched
        if switched:
            self.name += "_switched"
            self.pipe.transformer.register_forward_pre_hook(switch_prompts, with_kwargs=True)

    def _measured(self, variant, index, handle, stock) -> dict:
        kept = super()._measured(variant, index, handle, stock)
        rows = [row for row in handle.report().rows if row["calls"]]
        share = sum(row["skipped_fraction"] for row in rows) / len(rows)
        lost = max(row["lost_max"] for row in rows)
        return {**kept, "skipped": torch.tensor([share]), "lost": torch.tensor([lost])}

    def rows(self, recipe: str, names: list[str], real: torch.Tensor) -> list[dict]:
        found = []
        for name in names:
            chunks = self._chunks(name)
            share, lost = (torch.cat([chunk[key] for chunk in chunks]).double() for key in ("skipped", "lost"))
            count = self.size.images
            found.append(Row(name, "skipped_mean", "1", *mean_interval(share), count))
            found.append(Row(name, "lost_max", "1", *(lost.max().item(),) * 3, count))
        rows = super().rows(recipe, names, real) + self._table(found, recipe)
        # with two prompts in a run, it is undefined which one a clip should show
        return [row for row in rows if not (self.switched and row["metric"] == "obeyed_mean")]

    def promised(self, result: dict, clips: int) -> list[dict]:
        """Return rows of calibrate's own measurement on fresh prompts.

        They are PSNR, dB, and the skipped share of the tile pairs of all calls. result: of a Calibration. clips: their
        number.
        """
        named = (("promised_psnr_db", "dB", result["psnr_db"]), ("promised_skipped", "1", result["skipped_fraction"]))
        rows = [Row("calibrated", name, unit, value, value, value, clips) for name, unit, value in named]
        return self._table(rows, DEFAULT_RECIPE)


def switch_prompts(module, inputs, named):
    if named["timestep"].flatten()[0] < SWITCH_AT:
        named["encoder_hidden_states"] = named["encoder_hidden_states"].roll(1, 0)
    return inputs, named


def chosen(
    measurement: SkipMeasurement, target: float, search: int, work: Path, config: sp.SageAttnProcessor
) -> tuple[sp.SageAttnProcessor, list[dict]]:
    """Run calibrate on prompts of its own. Returns the options from the policy, and `promised` rows."""
    words = tiny_videos.captions()
    texts = [words[i] for i in measure_video.scenes(2 * search, SEARCH_SEED).caption_index().tolist()]
    found = sp.calibrate(
        measurement.pipe, texts[:search], held_out=texts[search:], target_psnr=target, scalings=("timestep",),
        skip_limits=LIMITS, config=config, steps=measurement.size.steps, batch=measurement.size.batch,
        arguments=measurement.arguments, progress=False,
        path=work / "policy.json", state_path=work / "state.json",
    )  # fmt: skip
    print(f"calibrate for {target:.2f} dB: {'met' if found.met else 'not met'}, {found.result}", flush=True)
    config = sp.SageAttnProcessor.from_policy(work / "policy.json")
    return config, measurement.promised(found.result, search)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(measure_video.SIZES), default="long")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clips", type=int, default=64)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--search", type=int, default=12, help="prompts for calibrate to search on, and as many fresh")
    parser.add_argument("--part", choices=("all", "switched"), default="all", help="switched: draw those, no table")
    parser.add_argument("--compensate", action="store_true", help="in a --work of its own")
    parser.add_argument("--work", type=Path, required=True, help="folder of the unfinished parts")
    parser.add_argument("--out", type=Path, default=measure.HERE / "data" / "skipping.csv", help="the table")
    arguments = parser.parse_args()
    check_output(arguments.out, "--out")
    count = measure.Size(arguments.clips, arguments.steps, arguments.batch)
    size = pipelines.call_arguments(measure_video.NAME) | measure_video.SIZES[arguments.size]
    real = measure_video.true_features(size, load_classifier())
    variants = {"dense": options()}
    skips = {limit: {"limit": limit, "compensate": arguments.compensate} for limit in LIMITS}
    variants |= {f"within {limit:g}": options(skip=skip) for limit, skip in skips.items()}
    table = []
    for switched in (False, True) if arguments.part == "all" else (True,):
        measurement = SkipMeasurement(arguments.size, count, arguments.device, arguments.work, switched)
        for name, config in variants.items():
            start = time.monotonic()
            measurement.run(quality.Variant(name, config))
            print(f"{measurement.name} {name}: {time.monotonic() - start:.0f} s", flush=True)
        if not switched:
            dense = measurement.sets(["dense"])[0].psnr_db.mean().item()
            found = options(skip={"compensate": arguments.compensate})
            config, promised = chosen(measurement, dense - LOSS_DB, arguments.search, arguments.work, found)
            variants["calibrated"] = config
            table += promised
            measurement.run(quality.Variant("calibrated", config))
        if arguments.part != "all":
            return 0
        table += measurement.rows(DEFAULT_RECIPE, list(variants), real)
    return measure.finish(table, 0, arguments.out, None)


if __name__ == "__main__":
    sys.exit(main())
