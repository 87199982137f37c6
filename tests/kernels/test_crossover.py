"""The table of crossovers: every row has the evidence that it names, and both sides of Hugging Face ask it."""

from __future__ import annotations

import re

import pytest
import torch

import sage_kernels
import sage_processors as sp
from sage_kernels.facts import crossover, few_rows
from sage_kernels.results import read_rows
from tests.support.language_calls import forward, tiny
from tests.support.repository import ROOT
from tests.support.tiny_language_models import tokens
from tests.support.tiny_models import MODELS


RESULTS = ROOT / "kernels" / "benchmarks" / "results.csv"
RECIPE = sage_kernels.DEFAULT_RECIPE
FORGETFUL_LIMITS = crossover._limits.__wrapped__


@pytest.fixture
def on_gpu(monkeypatch):
    """Calls on the CPU are judged as those of a GPU with this table: on_gpu(row, ...)."""

    def pretend(*rows):
        monkeypatch.setattr(crossover, "_limits", FORGETFUL_LIMITS)
        monkeypatch.setattr(crossover, "gpu_class", lambda device: "hopper")
        monkeypatch.setattr(crossover, "CROSSOVERS", rows)

    return pretend


def row(tokens, scores=0, *, causal=False, head_dim=256):
    return crossover.Crossover("hopper", head_dim, RECIPE, causal, tokens, scores, crossover.CUDNN)


# --- the table ---


@pytest.mark.parametrize("row", [r for r in crossover.CROSSOVERS if r.evidence], ids=lambda r: r.evidence[0])
def test_a_row_is_what_was_measured(row):
    """The newest measurements of a row's cases, on each GPU of its class that they were made on, reach break-even, and
    the shortest of them is where INT8 begins."""
    gpus = {"hopper": ("H100", "H200")}[row.gpu]
    speeds = [r for r in read_rows(RESULTS) if r["metric"] in ("throughput", "time")]
    newest = {(gpu, r["case"], r["provider"], r["recipe"]): r for r in speeds for gpu in gpus if gpu in r["gpu"]}
    assert row.evidence and row.against in (crossover.CUDNN, crossover.FLASH)
    lengths, scores = [], []
    for case in row.evidence:
        measured = [gpu for gpu in gpus if (gpu, case, "sage_kernels", row.recipe) in newest]
        assert measured, case
        for gpu in measured:
            ours = newest[gpu, case, "sage_kernels", row.recipe]
            assert ours["causal"] == str(row.causal)
            assert int(ours["head_dim"]) <= row.head_dim
            stock = newest.get((gpu, case, row.against, "")) or newest[gpu, case.partition("/")[0], row.against, ""]
            speed = float(ours["median"]) / float(stock["median"])
            speed = speed if ours["metric"] == "throughput" else 1 / speed
            assert speed >= crossover.BREAK_EVEN, f"{case}: {speed:.3f} times {row.against}, {gpu}"
            lengths.append(min(int(ours["seq_q"]), int(ours["seq_k"])))
            scores.append(int(ours["batch"]) * int(ours["heads"]) * int(ours["seq_q"]) * int(ours["seq_k"]))
    assert row.tokens == min(lengths) and 0 < row.scores <= min(scores)


def test_few_rows_are_multiplied_faster_than_with_16_bit_weights(monkeypatch):
    """In the newest row of every case that the table takes for few, the 8-bit weight wins, in either format."""
    monkeypatch.setattr(few_rows, "gpu_class", lambda device: "hopper")
    measured = [r for r in read_rows(RESULTS) if r["suite"] == "linear_few_rows" and r["provider"] == "sage_kernels"]
    newest = {(r["case"], r["recipe"]): r for r in measured}
    seen = set()
    for (case, recipe), r in newest.items():
        format, _, kind = recipe.removeprefix("linears_").partition("_")
        if kind != "weights":
            continue
        few_rows.most_rows.cache_clear()
        limit = few_rows.most_rows(torch.device("cuda"), format, int(r["seq_q"]) * int(r["seq_k"]))
        if int(case.rpartition("_")[2]) <= limit:
            assert float(r["ratio_vs_cudnn"]) > 1, (case, recipe)
            seen.add((format, limit))
    few_rows.most_rows.cache_clear()
    assert seen == {("int8", 8), ("int8", 16), ("int8", 32), ("fp8", 8)}


def test_short_prompts_and_decoding_stay_exact_on_every_gpu():
    assert all(row.tokens > 512 for row in crossover.CROSSOVERS if row.causal)


def test_rows_that_were_not_measured_are_the_careful_ones():
    for row in crossover.CROSSOVERS:
        if not row.evidence:
            assert row.tokens >= 4096 and row.scores >= 2**28, row


@pytest.mark.parametrize("gpu", ["ampere", "ada", "hopper", "blackwell", "consumer_blackwell", "amd"])
@pytest.mark.parametrize("head_dim", [1, 64, 72, 128, 136, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("recipe", sage_kernels.RECIPES)
def test_every_call_finds_a_row(gpu, head_dim, causal, recipe):
    found = crossover.find_crossover(gpu, head_dim, recipe, causal)
    assert found in crossover.CROSSOVERS and found.causal == causal and found.head_dim >= head_dim
    assert found.gpu in (gpu, crossover.ANY_GPU)


def test_a_recipe_without_a_row_never_pays():
    assert crossover.find_crossover("hopper", 128, "int3", False).tokens == crossover.NEVER


@pytest.mark.parametrize(
    "capability, name",
    [((8, 0), "ampere"), ((8, 6), "ampere"), ((8, 9), "ada"), ((9, 0), "hopper"), ((10, 0), "blackwell"),
     ((10, 3), "blackwell"), ((11, 0), "blackwell"), ((12, 0), "consumer_blackwell"), ((12, 1), "consumer_blackwell")],
)  # fmt: skip
def test_gpu_classes(capability, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert crossover.gpu_class(torch.device("cuda")) == name
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert crossover.gpu_class(torch.device("cuda")) == "amd"


def short(seq_q, seq_kv, *, batch=1, heads=8, **options):
    sizes = {"batch": batch, "heads": heads, "seq_q": seq_q, "seq_kv": seq_kv, "head_dim": 128}
    return crossover.is_short(torch.device("cpu"), **sizes, **options)


def test_a_cpu_runs_everything_in_int8():
    assert not short(1, 1) and not short(1, 1, causal=True)


def test_queries_keys_and_work_all_count(on_gpu):
    on_gpu(row(1000, 10_000_000))
    assert short(999, 100_000) and short(100_000, 999) and short(1000, 1000)  # 8 heads: 8 million scores
    assert not short(1000, 1000, batch=2) and not short(1200, 1200)
    assert short(2000, 2000, causal=True), "no row for causal calls"


def test_min_tokens_overrides_the_table(on_gpu):
    on_gpu(row(1000))
    assert not short(1, 1, min_tokens=0) and not short(128, 128, min_tokens=128)
    assert short(5000, 127, min_tokens=128) and short(127, 5000, min_tokens=128)


# --- diffusers ---


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


def test_strict_says_how_to_run_short_calls_in_int8(on_gpu):
    model, inputs = MODELS["flux"]()
    on_gpu(row(10_000))
    with sp.apply(model, sp.SageAttnProcessor(on_unsupported="raise")), pytest.raises(
        sp.UnsupportedAttentionError, match=re.escape("min_tokens=0")
    ):  # fmt: skip
        run(model, inputs)


def test_plans_survive_short_calls(on_gpu):
    """A step at a short length in between neither uses nor changes what the long calls have learnt."""
    model, inputs = MODELS["flux"]()
    few = inputs["hidden_states"].shape[1] - 5
    small = inputs | {"hidden_states": inputs["hidden_states"][:, :few], "img_ids": inputs["img_ids"][:few]}
    total = inputs["hidden_states"].shape[1] + inputs["encoder_hidden_states"].shape[1]

    def outputs(kinds):
        on_gpu(row(total))
        with sp.apply(model) as handle:
            found = [run(model, given | {"timestep": torch.tensor([0.9 - 0.1 * i])}) for i, given in kinds]
            return found, handle.report()

    wanted, before = outputs([(0, inputs), (2, inputs), (3, inputs)])
    found, after = outputs([(0, inputs), (1, small), (2, inputs), (3, inputs)])
    assert before.fallbacks == {} and set(after.fallbacks) == {"short"}
    assert after.calls == before.calls == 3 * len(before.rows)
    assert [r["dynamic_calls"] for r in after.rows] == [r["dynamic_calls"] for r in before.rows]
    assert all(torch.equal(a, b) for a, b in zip(wanted, [found[0], *found[2:]], strict=True))


# --- transformers ---


@pytest.mark.parametrize("length, is_int8", [(99, False), (100, True)])
def test_short_prompts_are_exact_counted_and_named(length, is_int8, on_gpu):
    model, _ = tiny(implementation="sdpa")
    inputs = {"input_ids": tokens(1, length)}
    stock = forward(model, inputs)
    on_gpu(row(100, causal=True))
    model.set_attn_implementation("sage_int8")
    out = forward(model, inputs)
    report = sp.attention_report(model)
    assert (report.calls, report.fallbacks) == ((2, {}) if is_int8 else (0, {"short": 2}))
    assert torch.equal(out, stock) != is_int8


def test_a_name_of_ones_own_turns_the_table_off(on_gpu):
    on_gpu(row(10_000, causal=True))
    name = sp.register_transformers("sage_never_short", min_tokens=0)[0]
    model, _ = tiny(implementation=name)
    forward(model, {"input_ids": tokens(1, 3)})
    assert sp.attention_report(model).calls == 2
