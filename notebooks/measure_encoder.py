"""Measure INT8 on a sentence encoder that others trained, all-MiniLM-L6-v2, and append rows to results.csv.

    make real                                     # fetches the model once
    python notebooks/measure_encoder.py --append kernels/benchmarks/results.csv

Paragraphs of three kinds of text (measure_language.py) are cut in two. The first half is a question, the second one
the passage to be found. Embeddings are compared with those of the same model in fp32, on the CPU: 1 - cosine, over
that of the model in bf16, and the share of questions whose own passage comes first. Intervals, which are printed, are
95 % of a paired bootstrap over paragraphs.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any, NamedTuple


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "kernels")]

import torch  # noqa: E402
from measure_language import KINDS, text_of  # noqa: E402

import sage_processors as sp  # noqa: E402
from sage_kernels import DEFAULT_RECIPE  # noqa: E402
from sage_kernels.results import append_row  # noqa: E402
from sage_processors.evaluation.language import embeddings  # noqa: E402
from tests.support import real_models  # noqa: E402


MODES = ("bf16", "int8", "all")
TOKENS = 256  # of a half at most, as the model was trained
LEAST_WORDS = 60  # of a paragraph
DRAWS = 2000
# as "sage_int8" is, but for short calls, too
NAME = sp.register_transformers("sage_measured", min_tokens=0, rotation="hadamard")[0]


class Found(NamedTuple):
    """Embeddings of both halves of paragraphs, fp32 [N, features] each, of length 1."""

    questions: torch.Tensor
    passages: torch.Tensor

    def distance(self, exact: Found) -> torch.Tensor:
        """1 - cosine to another model's embeddings, fp64 [N]: the mean of both halves."""
        cosines = [(x.double() * y.double()).sum(-1) for x, y in zip(self, exact, strict=True)]
        return 1 - torch.stack(cosines).mean(0)

    def first(self) -> torch.Tensor:
        """Index of the passage that is nearest to each question, int64 [N]."""
        return (self.questions @ self.passages.T).argmax(-1)


def halves(kind: str, most: int) -> list[tuple[str, str]]:
    """Paragraphs of a text of a kind, each cut in two in its middle."""
    words = [paragraph.split() for paragraph in text_of(kind).split("\n\n")]
    words = [x for x in words if len(x) >= LEAST_WORDS]
    chosen = words[:: max(1, len(words) // most)][:most]
    return [(" ".join(x[: len(x) // 2]), " ".join(x[len(x) // 2 :])) for x in chosen]


def embed(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """Embeddings, fp32 [N, features]: the mean over tokens, of length 1."""
    found = []
    for start in range(0, len(texts), 16):
        given = tokenizer(
            texts[start : start + 16], padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        found.append(embeddings(model, given["input_ids"], given["attention_mask"]))
    return torch.cat(found)


def measured(model: Any, tokenizer: Any, mode: str, pairs: list[tuple[str, str]]) -> Found:
    """Embed all halves as a mode does: fp32, bf16, with INT8 attention, or with INT8 layers, too."""
    runner = copy.deepcopy(model)
    if mode == "bf16":
        runner.bfloat16()
    if mode in ("int8", "all"):
        runner.set_attn_implementation(NAME)
    swap = sp.quantize_linears(runner, min_features=1) if mode == "all" else None
    found = Found(*(embed(runner, tokenizer, list(texts)) for texts in zip(*pairs, strict=True)))
    if mode in ("int8", "all"):
        for report in (sp.attention_report(runner), *([] if swap is None else [swap.report()])):
            if report.fallbacks or not report.calls:
                raise RuntimeError(f"{mode}: not all calls ran in 8 bit: {report}")
    return found


def interval(values: torch.Tensor) -> list[float]:
    """[mean, low, high] of fp64 [N] or, as the ratio of two means, of fp64 [2, N]."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(values.shape[-1], (DRAWS, values.shape[-1]), generator=generator)

    def mean(x: torch.Tensor) -> torch.Tensor:
        means = x.mean(-1)
        return means[0] / means[1] if values.dim() == 2 else means

    limits = mean(values[..., drawn]).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return [mean(values).item(), *limits.tolist()]


def rows_of(kind: str, found: dict[str, Found]) -> list[dict[str, Any]]:
    """Rows of results.csv, printed with their intervals. found: by mode, with "fp32"."""
    exact, rows = found["fp32"], []
    own = torch.arange(len(exact.questions))
    for mode, x in found.items():
        ours = mode in ("int8", "all")
        common = {"suite": "real_language", "case": f"{real_models.ENCODER}/{kind}", "gpu": "cpu", "unit": "1"}
        common |= {"provider": "sage_kernels" if ours else "torch_sdpa", "batch": len(own), "seq_q": TOKENS}
        common["recipe"] = f"{DEFAULT_RECIPE}/{mode}" if ours else mode
        hits = (x.first() == own).double()
        figures = {"retrieval_top1": hits, "same_passage": (x.first() == exact.first()).double()}
        if ours:
            distances = torch.stack([x.distance(exact), found["bf16"].distance(exact)])
            figures["distance_over_bf16"] = distances
        for metric, values in figures.items():
            value, low, high = (round(y, 4) for y in interval(values))
            print(*common.values(), metric, value, low, high, flush=True)
            rows.append(common | {"metric": metric, "median": value})
    return rows


def main() -> None:
    """Measure all modes on all kinds of text, and print or append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paragraphs", type=int, default=96, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--append", type=Path, help="a results.csv")
    arguments = parser.parse_args()
    model, tokenizer = real_models.load(real_models.ENCODER)
    for kind in arguments.kinds:
        pairs = halves(kind, arguments.paragraphs)
        found = {mode: measured(model, tokenizer, mode, pairs) for mode in ("fp32", *MODES)}
        for row in rows_of(kind, found):
            if arguments.append:
                append_row(arguments.append, **row)


if __name__ == "__main__":
    main()
