"""Measure INT8 on two language models that others trained, for real_language.ipynb: writes data/language*.csv.

    make real                                     # fetches the models once
    python notebooks/measure_language.py          # goes on where it stopped; one mode of one text at a time

Everything is compared with the same model in fp32 on the CPU, token by token. Three kinds of text: prose and reference
(the pages of pydoc), source code (of the standard library), and dialogues that come with tiny_lm. Defaults were chosen
on the first kind; the others were held back.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gc
import inspect
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "kernels")]

import torch  # noqa: E402
from language_tasks import answers, haystack, single_token_names, tasks_of  # noqa: E402

import sage_processors as sp  # noqa: E402
from sage_kernels.testing import relative_l2  # noqa: E402
from sage_processors import pipelines  # noqa: E402
from sage_processors.evaluation.language import with_attention  # noqa: E402
from tests.support import real_models  # noqa: E402


BLOCK = 128  # tokens of a row
KEPT = 5  # largest KL of a block that are written down: enough for the 99th percentile of all
FIELDS = ("model", "kind", "text", "first", "mode", "kl", "largest", "nll", "top1")
LAYER_FIELDS = ("model", "layer", "mode", "error")
TASK_FIELDS = ("model", "tokens", "text", "mode", "task", "case", "score", "answer")
GREEDY = 40  # tokens
FIRST = 256  # tokens of the first call where the cache is filled in parts, and of every later one
KINDS = ("reference", "code", "dialogues")
NEEDS_PARTS = ("kv", "all")


# --- ways to run a model ---


@contextmanager
def mode_of(model: Any, mode: str) -> Iterator[Any]:
    """Yield the model as a mode runs it: fp32, bf16, or INT8 of a part or of all."""
    options: dict[str, Any] = {"min_tokens": 0}
    if mode.startswith("bf16"):
        model, mode = copy.deepcopy(model).bfloat16(), mode.removeprefix("bf16_")
    if mode in ("fp32", "bf16"):
        yield model
    elif mode == "uncalibrated":
        with sp.quantize_linears(model, min_features=1):
            yield model
    elif mode == "int8":  # without the rotation
        with with_attention(model, sp.register_transformers("sage_unrotated", min_tokens=0)[0]):
            yield model
    else:
        if mode in ("linears", "all"):
            options["linears"] = sp.Linears("int8", min_features=1)
        with sp.apply(model, sp.SageAttnProcessor(**options)):
            yield model


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor, mode: str) -> torch.Tensor:
    """Log-probabilities fp32 [S, V] of one text, in one call or, over an INT8 cache, in parts."""
    if mode not in NEEDS_PARTS:
        return model(ids, use_cache=False).logits[0].float().log_softmax(-1)
    cache = sp.Int8KVCache(model.config)
    parts = [model(part, past_key_values=cache, use_cache=True).logits[0].float() for part in ids.split(FIRST, 1)]
    return torch.cat(parts).log_softmax(-1)


def rows_of(exact: torch.Tensor, found: torch.Tensor, ids: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Compare two results [S, V] of a text block by block."""
    for first in range(0, len(exact) - 1, BLOCK):
        part = slice(first, min(first + BLOCK, len(exact) - 1))
        p, q, following = exact[part], found[part], ids[0, 1:][part, None]
        kl = (p.exp() * (p - q)).sum(-1)
        largest = " ".join(f"{x:.3g}" for x in kl.topk(min(KEPT, len(kl))).values.tolist())
        yield {
            "first": first, "kl": f"{kl.mean():.4g}", "largest": largest,
            "nll": f"{-q.gather(1, following).mean():.6f}",
            "top1": f"{(p.argmax(-1) == q.argmax(-1)).float().mean():.4f}",
        }  # fmt: skip


# --- texts ---


def text_of(kind: str) -> str:
    """A long text of a kind."""
    if kind == "reference":
        return real_models.text()
    if kind == "code":
        return "\n\n".join(inspect.getsource(module) for module in (argparse, csv, inspect, json, tempfile))
    documents = json.loads((pipelines.installed_folder("tiny_lm") / "heldout.json").read_text(encoding="utf-8"))
    found = "\n\n".join(x["text"] for x in documents if x["kind"] == "dialogues")
    return found.replace("<|user|>", "User: ").replace("<|assistant|>", "Assistant: ").replace("<|end|>", "\n")


def windows(name: str, tokenizer: Any, kind: str, count: int, length: int) -> torch.Tensor:
    """Token ids int64 [count, length] from places spread over a text of a kind."""
    before = real_models.CHECKPOINTS[name].tokens_before
    ids = tokenizer(text_of(kind), add_special_tokens=False, verbose=False).input_ids
    kept = length - len(before)
    starts = [i * (len(ids) - kept) // max(1, count - 1) for i in range(count)]
    return torch.tensor([[*before, *ids[start : start + kept]] for start in starts])


# --- data ---


class Table:
    """A CSV file that is written row by row, so that an interrupted measurement goes on."""

    def __init__(self, path: Path, fields: tuple[str, ...], key: tuple[str, ...]):
        self.path, self.fields, self.key = path, fields, key
        self.done = {tuple(row[k] for k in key) for row in read(path)} if path.exists() else set()
        if not path.exists():
            path.write_text(",".join(fields) + "\n", encoding="utf-8")

    def has(self, *key: Any) -> bool:
        """True if rows with this key are there."""
        return tuple(map(str, key)) in self.done

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append rows."""
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.fields, lineterminator="\n").writerows(rows)
        self.done |= {tuple(str(row[k]) for k in self.key) for row in rows}


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measure_texts(model: Any, tokenizer: Any, table: Table, modes: list[str], count: int, length: int) -> None:
    """Compare every mode with fp32 on texts of each kind."""
    for text in range(count):
        for kind in KINDS:
            wanted = [mode for mode in ("fp32", *modes) if not table.has(model.real_name, kind, text, mode)]
            if not wanted:
                continue
            ids = windows(model.real_name, tokenizer, kind, count, length)[text : text + 1]
            exact = log_probabilities(model, ids, "fp32")
            for mode in wanted:
                with mode_of(model, mode) as runner:
                    found = exact if mode == "fp32" else log_probabilities(runner, ids, mode)
                own = {"model": model.real_name, "kind": kind, "text": text, "mode": mode}
                table.add([own | row for row in rows_of(exact, found, ids)])
                print(model.real_name, kind, text, mode, flush=True)
                del found, runner
                gc.collect()


# --- layers ---


def measure_layers(model: Any, tokenizer: Any, table: Table, length: int) -> None:
    """Relative L2 error of each layer's attention on its own inputs of one text: of bf16, and of INT8."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import sage_kernels

    if any(table.has(model.real_name, 0, mode) for mode in ("int8",)):
        return
    stock: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS["sdpa"]
    rows: list[dict[str, Any]] = []

    def measured(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **others: Any) -> Any:
        out = stock(module, query, key, value, mask, scaling=scaling, is_causal=True)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        window = getattr(module, "sliding_window", None)
        given: dict[str, Any] = {"causal": True, "scale": scaling}
        given["window"] = window if window is not None and window < q.shape[1] else None
        half = stock(module, *(x.bfloat16() for x in (query, key, value)), mask, scaling=scaling, is_causal=True)[0]
        found = {
            "bf16": half.float(),
            "int8": sage_kernels.sage_attention(q, k, v, **given),
            "rotated": sage_kernels.sage_attention(q, k, v, rotation="hadamard", **given),
        }
        for mode, x in found.items():
            error = f"{relative_l2(x, out[0]):.5f}"
            rows.append({"model": model.real_name, "layer": module.layer_idx, "mode": mode, "error": error})
        return out

    AttentionInterface.register("real_measured", measured)
    AttentionMaskInterface.register("real_measured", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("real_measured")
    with torch.no_grad():
        model(windows(model.real_name, tokenizer, "code", 2, length)[:1], use_cache=False, logits_to_keep=1)
    model.set_attn_implementation(before)
    table.add(rows)
    print(model.real_name, "layers", flush=True)


# --- tasks ---


def measure_tasks(model: Any, tokenizer: Any, table: Table, modes: list[str], texts: dict[int, int]) -> None:
    """Ask questions on long texts, in every mode. texts: {tokens: number of texts of that length}."""
    before = real_models.CHECKPOINTS[model.real_name].tokens_before
    names = single_token_names(tokenizer)
    for tokens, count in texts.items():
        for seed in range(tokens, tokens + count):
            tasks = tasks_of(seed, names)
            text = [*before, *haystack(tokenizer, real_models.text(), tasks, tokens, seed)]
            for mode in ("fp32", *modes):
                if table.has(model.real_name, tokens, seed, mode):
                    continue
                with mode_of(model, mode) as runner:
                    found = list(answers(runner, tokenizer, text, tasks, cache_of(runner, mode), FIRST))
                own = {"model": model.real_name, "tokens": tokens, "text": seed, "mode": mode}
                rows = [{"task": x[0], "case": x[1], "answer": x[2].strip(), "score": int(x[3])} for x in found]
                table.add([own | row for row in rows])
                scores = {task: sum(row["score"] for row in rows if row["task"] == task) for task in tasks}
                print(model.real_name, tokens, seed, mode, scores, flush=True)
                del found, runner
                gc.collect()


def cache_of(model: Any, mode: str) -> Callable[[], Any]:
    """Return what makes the cache that a mode decodes over."""
    if mode in NEEDS_PARTS:
        return lambda: sp.Int8KVCache(model.config)
    from transformers import DynamicCache

    return lambda: DynamicCache(config=model.config)


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, text: str, mode: str, before: tuple[int, ...]) -> str:
    """Continue a text greedily, over an INT8 cache in the modes that have one."""
    ids = torch.tensor([[*before, *tokenizer(text, add_special_tokens=False).input_ids]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY, do_sample=False, pad_token_id=0,
        eos_token_id=None, past_key_values=cache_of(model, mode)(),
    )  # fmt: skip
    return tokenizer.decode(out[0, ids.shape[1] :])


def measure_greedy(model: Any, tokenizer: Any, table: Table, modes: list[str]) -> None:
    """Continue openings of the reference greedily in every mode."""
    before = real_models.CHECKPOINTS[model.real_name].tokens_before
    for case, start in enumerate((10_000, 110_000)):
        for mode in ("fp32", *modes):
            if table.has(model.real_name, 0, case, mode):
                continue
            with mode_of(model, mode) as runner:
                said = greedy(runner, tokenizer, text_of("reference")[start : start + 400], mode, before)
            said = "\n".join(line.rstrip() for line in said.split("\n"))  # as all committed files
            own = {"model": model.real_name, "tokens": 0, "text": case, "mode": mode, "task": "greedy", "case": case}
            table.add([own | {"answer": said, "score": ""}])
            print(model.real_name, "greedy", case, mode, repr(said[:40]), flush=True)


def append_to_results(path: Path, rows: list[dict[str, str]]) -> None:
    """Append a row of results.csv for each model, kind of text and mode: mean KL over bf16's own, and perplexity."""
    from sage_kernels import DEFAULT_RECIPE
    from sage_kernels.results import append_row

    found: dict[tuple[str, str, str], dict[tuple[str, str], dict[str, str]]] = {}
    for row in rows:
        found.setdefault((row["model"], row["kind"], row["mode"]), {})[row["text"], row["first"]] = row
    for (model, kind, mode), own in found.items():
        exact, floor = (found.get((model, kind, name), {}) for name in ("fp32", "bf16"))
        places = [place for place in own if place in exact and place in floor]
        if mode in ("fp32", "bf16") or not places:
            continue

        def mean(table: dict[tuple[str, str], dict[str, str]], name: str, places: Any = places) -> float:
            return sum(float(table[place][name]) for place in places) / len(places)

        common: dict[str, Any] = {"suite": "real_language", "case": f"{model}/{kind}", "provider": "sage_kernels"}
        common |= {"recipe": f"{DEFAULT_RECIPE}/{mode}", "batch": len({text for text, _ in places}), "gpu": "cpu"}
        common |= {"seq_q": BLOCK * len(places) // common["batch"], "unit": "1"}
        ratio = round(mean(own, "kl") / mean(floor, "kl"), 4)
        append_row(path, **common, metric="kl_over_bf16", median=ratio)
        change = round(math.exp(mean(own, "nll") - mean(exact, "nll")), 6)
        append_row(path, **common, metric="perplexity_ratio", median=change)


def append_tasks(path: Path, rows: list[dict[str, str]]) -> None:
    """Append a row for each model, length and mode: the share of questions answered rightly."""
    from sage_kernels import DEFAULT_RECIPE
    from sage_kernels.results import append_row

    scores: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        if row["score"]:
            scores.setdefault((row["model"], row["tokens"], row["mode"]), []).append(int(row["score"]))
    for (model, tokens, mode), own in scores.items():
        is_stock = mode in ("fp32", "bf16")
        common: dict[str, Any] = {"suite": "real_language", "case": f"{model}/tasks", "gpu": "cpu", "unit": "1"}
        common |= {"provider": "torch_sdpa" if is_stock else "sage_kernels", "batch": len(own), "seq_q": int(tokens)}
        recipe = mode if is_stock else f"{DEFAULT_RECIPE}/{mode}"
        append_row(path, **common, recipe=recipe, metric="task_score", median=round(sum(own) / len(own), 4))


def main() -> None:
    """Measure what is not in the tables yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(real_models.CHECKPOINTS))
    parser.add_argument("--modes", nargs="+", default=["bf16", "int8", "rotated", "kv", "linears", "all"])
    parser.add_argument("--parts", nargs="+", default=["texts", "layers", "tasks"])
    parser.add_argument("--texts", type=int, default=2, help="texts of each kind")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8000], help="of the tasks' texts")
    parser.add_argument("--haystacks", type=int, nargs="+", default=[3, 1, 1], help="texts of each of these lengths")
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument(
        "--append", type=Path, help="measure nothing, and append the tables' figures to this results.csv"
    )
    given = parser.parse_args()
    if given.append is not None:
        append_to_results(given.append, read(given.out / "language.csv"))
        append_tasks(given.append, read(given.out / "language_tasks.csv"))
        return
    torch.set_num_threads(2)
    keys = {"texts": ("model", "kind", "text", "mode"), "layers": ("model", "layer", "mode")}
    keys["tasks"] = ("model", "tokens", "text", "mode")
    fields = {"texts": FIELDS, "layers": LAYER_FIELDS, "tasks": TASK_FIELDS}
    paths = {"texts": "language.csv", "layers": "language_layers.csv", "tasks": "language_tasks.csv"}
    tables = {part: Table(given.out / paths[part], fields[part], keys[part]) for part in given.parts}
    for name in given.models:
        model, tokenizer = real_models.load(name)
        model.real_name = name
        if "layers" in tables:
            measure_layers(model, tokenizer, tables["layers"], given.length)
        if "texts" in tables:
            measure_texts(model, tokenizer, tables["texts"], given.modes, given.texts, given.length)
        if "tasks" in tables:
            modes = [mode for mode in given.modes if mode in ("bf16", "rotated", "all")]
            counts = dict(zip(given.tokens, given.haystacks, strict=True))
            measure_tasks(model, tokenizer, tables["tasks"], modes, counts)
            measure_greedy(model, tokenizer, tables["tasks"], modes)
        del model


if __name__ == "__main__":
    main()
