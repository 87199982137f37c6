"""Draw pictures with stock attention and every recipe x scaling, and write a table of their quality.

    python notebooks/measure.py --device cuda --images 256 --steps 25 --batch 32 --work measured
    python notebooks/measure.py --work measured_cpu                        # the CPU's small run
    … --minutes 9                                                          # stop in time; the same command continues

The notebook psnr_fid_comparison.py shows the table. Every batch of pictures is a file in the work folder, and its
numbers do not depend on earlier batches: an interrupted run and an uninterrupted one write the same table. Prompts and
true pictures are drawn from one distribution (examples/tiny_data.py), so feature-FD compares like with like.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch


HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parent / "kernels", HERE.parent / "examples"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

import tiny_data  # noqa: E402
from picture_report import Pictures, Row, report  # noqa: E402

import sage_processors as sp  # noqa: E402
from sage_kernels import RECIPES  # noqa: E402
from sage_kernels.results import append_row, check_appendable, environment  # noqa: E402
from sage_processors import pipelines  # noqa: E402
from sage_processors.evaluation import hard_variants, quality  # noqa: E402
from sage_processors.evaluation.feature_distance import features, load_classifier  # noqa: E402
from sage_processors.files.whole_file import check_output, whole_file, write_whole  # noqa: E402
from sage_processors.option_groups import SCALINGS  # noqa: E402


COLUMNS = ("pipeline", "recipe", "scaling", "device", "steps", "images", "metric", "unit", "value", "low", "high")
PIXELS = 128
SCENE_SEED = 77  # of prompts and true pictures; unused in training, of the pipelines (from seed 0) and the classifier
FIRST_SEED = 5000  # of the noise; unused when settings were chosen
TRUE_PICTURES = 2048


class Size(NamedTuple):
    """Size of a measurement: pictures per variant, denoising steps, pictures per pipeline call."""

    images: int
    steps: int
    batch: int


def variants(recipe: str) -> dict[str, quality.Variant]:
    """Return a variant for every scaling, by name. INT-FlashAttention's recipes have only one."""
    if RECIPES[recipe].plain:
        config = sp.SageAttnProcessor(recipe=recipe, scaling="dynamic", min_tokens=quality.MIN_TOKENS)
        return {"dynamic": quality.Variant("dynamic", config)}
    both = (*quality.default_variants(recipe), *quality.study_variants(recipe))
    known = {variant.name: variant for variant in both}
    covered = {variant.config.scaling.name for variant in known.values()} | {"per_token"}  # another name of "dynamic"
    for scaling in sorted(set(SCALINGS) - covered):
        known[scaling] = quality.Variant(
            scaling, sp.SageAttnProcessor(recipe=recipe, scaling=scaling, min_tokens=quality.MIN_TOKENS)
        )
    return known


def load(name: str | Path, device: str):
    """Load an embedded pipeline or that of a folder, in fp32 on a CPU and bf16 on a GPU.

    A suffix _hard of the name is ignored.
    """
    from diffusers import DiffusionPipeline

    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch_dtype: the only name in diffusers 0.36
        source = name if isinstance(name, Path) else pipelines.path(name.removesuffix("_hard"))
        pipe = DiffusionPipeline.from_pretrained(source, torch_dtype=dtype, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def prompts(count: int) -> list[str]:
    """Return captions of drawn scenes, the same for every variant. Another count gives other captions."""
    scene = tiny_data.sample_scene(count, torch.device("cpu"), torch.Generator().manual_seed(SCENE_SEED))
    texts = tiny_data.captions()
    return [texts[i] for i in scene.caption_index().tolist()]


def true_features(count: int, model) -> torch.Tensor:
    """Return features, fp64 [count, 32], of drawn pictures with the prompts' distribution of scenes."""
    generator = torch.Generator().manual_seed(SCENE_SEED + 1)
    found = []
    for start in range(0, count, 64):
        scene = tiny_data.sample_scene(min(64, count - start), torch.device("cpu"), generator)
        found.append(features(tiny_data.draw(scene, PIXELS, generator) * 0.5 + 0.5, model))
    return torch.cat(found)


class Measurement:
    """Measurement of all variants of one pipeline, batch by batch.

    The numbers of a batch are in a file of their own, a chunk.

    Args:
        name: of an embedded pipeline; with "_hard" appended, outliers are planted in Q and K.
        size, device: of the measurement.
        folder: of the chunks. Chunks of another size, device or commit in it are an error.
        texts: one prompt per picture; None: `prompts`.
    """

    kind: type = Pictures  # class of a batch's numbers

    def __init__(self, name: str, size: Size, device: str, folder: Path, texts: list[str] | None = None):
        self.name, self.size, self.device = name, size, device
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_same({**size._asdict(), "device": torch.device(device).type, "commit": environment()["commit"]})
        self.model = load_classifier(device)
        self.pipe, self.arguments = self.loaded()
        self.texts = prompts(size.images) if texts is None else texts
        self.batches = [range(s, min(s + size.batch, size.images)) for s in range(0, size.images, size.batch)]

    def loaded(self) -> tuple[Any, dict]:
        """Return the pipeline, and arguments of its call."""
        return load(self.name, self.device), pipelines.call_arguments(self.name.removesuffix("_hard"))

    def _check_same(self, options: dict) -> None:
        path = self.folder / "options.json"
        if path.is_file() and json.loads(path.read_text()) != options:
            raise ValueError(
                f"work: {path} was made with {path.read_text().strip()}, expected {options}; choose another folder"
            )
        write_whole(path, json.dumps(options))

    def planted(self):
        """Return a context in which a pipeline with "_hard" in its name has outliers."""
        hard = self.name.endswith("_hard")
        denoiser = getattr(self.pipe, "unet", None) or self.pipe.transformer
        return hard_variants.inject_outliers(denoiser) if hard else nullcontext()

    def draw(self, batch: range, first_seed: int = FIRST_SEED) -> torch.Tensor:
        """Draw pictures [len(batch), 3, 128, 128] in [0, 1] for the prompts in `batch`."""
        texts = [self.texts[i] for i in batch]
        seeds = [first_seed + i for i in batch]
        return quality.generate(self.pipe, texts, seeds, steps=self.size.steps, **self.arguments)

    def _chunk(self, variant: str, index: int) -> Path:
        return self.folder / f"{variant}-{index}.pt"

    def stock(self, index: int) -> torch.Tensor:
        """Return the stock pictures of batch `index`, which are drawn once."""
        return self._kept("stock", index, lambda: {"images": self.draw(self.batches[index])})["images"]

    def _kept(self, variant: str, index: int, make) -> dict:
        path = self._chunk(variant, index)
        if not path.is_file():
            made = make()
            with whole_file(path) as file:  # so a chunk is never half written
                torch.save(made, file)
        return torch.load(path, weights_only=True)

    def run(self, variant: quality.Variant, over=lambda: False) -> bool:
        """Draw the missing batches of a variant. Returns False if `over()` stopped it before the end."""
        missing = [i for i in range(len(self.batches)) if not self._chunk(variant.name, i).is_file()]
        if not missing:
            return True
        stock = {}
        for index in missing:
            if over():
                return False
            stock[index] = self.stock(index)
        with sp.apply(self.pipe, variant.config) as handle:
            scales = self._scales(variant, handle) if variant.warm else None
            for index in missing:
                if over():
                    return False
                handle.reset()
                if scales is not None:
                    handle.load_scales(scales)
                self._kept(variant.name, index, lambda i=index: self._measured(variant, i, handle, stock[i]))
        return True

    def _measured(self, variant, index: int, handle, stock: torch.Tensor) -> dict:
        images = self.draw(self.batches[index])
        kept = self.kept(variant.name, images, stock, index)
        found = handle.report()
        if not found.calls:
            raise RuntimeError(f"{self.name}/{variant.name}: no attention call ran in INT8, nothing to measure")
        beyond = max(row["clipped_fraction"] for row in found.rows)
        return {**kept, "int8_calls": found.calls, "exact_calls": sum(found.fallbacks.values()), "beyond": beyond}

    def kept(self, label: str, images: torch.Tensor, stock: torch.Tensor, index: int) -> dict:
        """Return the content of the chunk of batch `index`."""
        return asdict(self.kind.measure(label, images, stock, self.model))

    def _chunks(self, variant: str) -> list[dict]:
        return [torch.load(self._chunk(variant, i), weights_only=True) for i in range(len(self.batches))]

    def sets(self, names: list[str]) -> list:
        """Return the numbers of each variant, joined over all batches."""
        fields = self.kind.__dataclass_fields__
        return [self.kind.join([self.kind(**{k: c[k] for k in fields}) for c in self._chunks(name)]) for name in names]

    def _scales(self, variant, handle) -> Path:
        """Return a file with the scales of a first, unmeasured run, from which every batch starts."""
        path = self.folder / f"{variant.name}.safetensors"
        if not path.is_file():
            handle.reset()
            self.draw(self.batches[0], first_seed=quality.WARM_UP_SEED)
            handle.save_scales(path)
        return path

    def rows(self, recipe: str, names: list[str], real: torch.Tensor) -> list[dict]:
        """Return the finished table of this pipeline, one dict of COLUMNS per number."""
        stock = torch.cat([self.stock(i) for i in range(len(self.batches))])
        return self._table(report(self.sets(names), features(stock, self.model), real), recipe)

    def _table(self, found: list[Row], recipe: str) -> list[dict]:
        where = {"device": device_name(self.device), "steps": self.size.steps, "pipeline": self.name}
        return [
            {**where, "recipe": "stock" if row.label == "stock" else recipe, "scaling": row.label, **_cells(row)}
            for row in found
        ]


def _cells(row: Row) -> dict:
    numbers = {name: f"{getattr(row, name):.7g}" for name in ("value", "low", "high")}
    return {"images": row.images, "metric": row.metric, "unit": row.unit, **numbers}


def device_name(device: str) -> str:
    """Return the device's name in the table: the GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def read_table(path: Path) -> list[dict[str, str]]:
    """Read the rows of a table of this script; [] if there is none yet."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def as_rows(table: list[dict[str, str]]) -> list[Row]:
    """Return a table's numbers as rows of `picture_report`."""
    return [
        Row(r["scaling"], r["metric"], r["unit"], *(float(r[n]) for n in ("value", "low", "high")), int(r["images"]))
        for r in table
    ]


def write_table(path: Path, rows: list[dict]) -> None:
    """Write rows into the table. Those of the same pipeline, recipe and device are replaced, others stay."""
    done = {(r["pipeline"], r["recipe"], r["device"]) for r in rows}
    kept = [r for r in read_table(path) if (r["pipeline"], r["recipe"], r["device"]) not in done]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept + rows)
    write_whole(path, text.getvalue())


def append_to_results(path: Path, rows: list[dict]) -> None:
    """Append the numbers to results.csv. p20 and p80 stay empty, since an interval is not a percentile."""
    for row in rows:
        append_row(
            path, gpu=row["device"], suite="quality", case=f"{row['pipeline']}/{row['scaling']}",
            provider="torch_sdpa" if row["recipe"] == "stock" else "sage_kernels",
            recipe="" if row["recipe"] == "stock" else row["recipe"], batch=row["images"],
            metric=row["metric"], unit=row["unit"], median=row["value"],
        )  # fmt: skip


def run_variants(measurement: Measurement, label: str, recipe: str, only: list[str] | None, deadline: float):
    """Measure the variants of a recipe, or `only` some.

    Returns: the names of the finished ones, and the number of the others.
    """
    done, unfinished = [], 0
    for variant in variants(recipe).values():
        if only and variant.name not in only:
            continue
        start = time.monotonic()
        if measurement.run(variant, lambda: time.monotonic() > deadline):
            done.append(variant.name)
        else:
            unfinished += 1
        print(f"{label} {variant.name}: {time.monotonic() - start:.0f} s", flush=True)
    return done, unfinished


def finish(table: list[dict], unfinished: int, out: Path, results: Path | None) -> int:
    """Write the table if it is complete. Returns the exit status."""
    if unfinished:
        print(f"{unfinished} variants are not done: run the same command again", flush=True)
        return 3
    write_table(out, table)
    if results:
        append_to_results(results, table)
    print(f"{len(table)} numbers in {out}, commit {environment()['commit']}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name + suffix for name in pipelines.names() for suffix in ("", "_hard")]
    parser.add_argument("--pipeline", action="append", choices=names, help="may be repeated; default: all")
    parser.add_argument("--recipe", choices=sorted(RECIPES), action="append", help="may be repeated; default: all")
    parser.add_argument("--variant", action="append", help="may be repeated; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this; the same command goes on")
    parser.add_argument("--work", type=Path, required=True, help="folder of the unfinished parts")
    parser.add_argument("--out", type=Path, default=HERE / "data" / "quality.csv", help="the table")
    parser.add_argument("--csv", type=Path, help="results.csv to append the table to as well")
    arguments = parser.parse_args()
    check_output(arguments.out, "--out")
    if arguments.csv:
        check_appendable(arguments.csv)
    deadline = time.monotonic() + 60 * arguments.minutes
    size = Size(arguments.images, arguments.steps, arguments.batch)
    unfinished, table = 0, []
    real = true_features(TRUE_PICTURES, load_classifier())
    for name in arguments.pipeline or names:
        for recipe in arguments.recipe or sorted(name for name, recipe in RECIPES.items() if not recipe.study):
            measurement = Measurement(name, size, arguments.device, arguments.work / recipe)
            with measurement.planted():
                done, missing = run_variants(measurement, f"{name} {recipe}", recipe, arguments.variant, deadline)
                unfinished += missing
                if done and not unfinished:
                    table += measurement.rows(recipe, done, real)
    return finish(table, unfinished, arguments.out, arguments.csv)


if __name__ == "__main__":
    sys.exit(main())
