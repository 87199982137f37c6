"""`time` and `rate` of language models and sentence encoders: what a user's one line runs, measured as it runs."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import sage_processors as sp
from sage_kernels.results import read_rows
from sage_processors.evaluation import language
from sage_processors.evaluation.protocol import timing
from tests.cli.test_rate import Page, invoke


@pytest.fixture(scope="module")
def tokenizer():
    return language.load_tokenizer("tiny_lm")


@pytest.fixture(scope="module")
def wide(tokenizer, tmp_path_factory):
    """A folder with a language model of one layer, wide enough for 8-bit linear layers."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, eos_token_id=None, **sizes
    )
    return saved(transformers.LlamaForCausalLM(config), tokenizer, tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def encoder(tokenizer, tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    return saved(transformers.BertForMaskedLM(config), tokenizer, tmp_path_factory.mktemp("encoder"))


def saved(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_rate_of_a_language_model(tmp_path):
    small = ("--windows", 4, "--context", 65, "--new-tokens", 3, "--device", "cpu", "--json")
    words = ("rate", "tiny_lm", *small, "--output", tmp_path / "lm", "--csv", tmp_path / "r.csv")
    found = invoke(*words)
    means = found["means"]
    assert 0 <= means["another exact kernel"]["kl"][0] < 1e-9 < means["int8"]["kl"][0] < 1e-3
    assert means["int8"]["loss"][0] == pytest.approx(means["stock"]["loss"][0], rel=0.01) and found["int8_calls"] > 0
    assert "perplexity" in found["verdict"] and Page(tmp_path / "lm" / "index.html").images == []
    assert "100% of attention calls and no linear layer" in found["verdict"]
    page = (tmp_path / "lm" / "index.html").read_text()
    assert "greedy texts as stock&#x27;s" in page and means["another exact kernel"]["identical"][0] == 1
    rows = list(read_rows(tmp_path / "r.csv"))
    assert {row["case"] for row in rows} == {f"tiny_lm/{x}" for x in ("stock", "prefill", "prefill_kv")}
    assert invoke(*words) == found and len(list(read_rows(tmp_path / "r.csv"))) == len(rows)


def test_the_figures_in_results_csv_are_those_of_all_windows(tmp_path):
    """In batches, as they are rated, or at once."""
    small = ("--windows", 3, "--context", 64, "--new-tokens", 4, "--batch", 2, "--device", "cpu", "--preset", "none")
    invoke("rate", "tiny_lm", *small, "--output", tmp_path / "lm", "--csv", tmp_path / "r.csv")
    model, tokenizer = language.load()
    windows = language.heldout_windows(tokenizer, 64, count=3)
    results = language.evaluate(model, windows, windows[:, :16], new_tokens=4, chunk=16, batch=3)
    rows = {(row["case"], row["metric"]): float(row["median"]) for row in read_rows(tmp_path / "r.csv")}
    for name, result in results.items():
        case = f"tiny_lm/{name}"
        assert rows[case, "perplexity"] == pytest.approx(result.perplexity.value, rel=1e-5)
        if name != "stock":
            assert rows[case, "perplexity_ratio"] == pytest.approx(result.ratio, abs=2e-5)
            assert rows[case, "identical_share"] == pytest.approx(result.identical, abs=1e-5)
            assert rows[case, "kv_bytes_per_token"] == result.kv_bytes_per_token


def test_a_language_models_rating_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    evaluate, calls = language.evaluate, []

    def watched(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(*args, **options)

    monkeypatch.setattr(language, "evaluate", watched)
    small = ("--windows", 3, "--batch", 2, "--context", 32, "--new-tokens", 2, "--device", "cpu")
    words = ("rate", "tiny_lm", *small, "--output", tmp_path / "lm")
    assert "Interrupted: the same command goes on" in invoke(*words, code=130)
    file = tmp_path / "lm" / "rating.json"
    first = json.loads(file.read_text())["rows"]
    assert len(first) == 2
    invoke(*words)
    rows = json.loads(file.read_text())["rows"]
    assert len(calls) == 3 and rows[:2] == first and len(rows) == 3
    file.write_text(file.read_text()[:100])
    said = " ".join(invoke(*words, code=2).split())
    assert "rating.json: got a file that is damaged" in said and "remove it to begin anew" in said


def test_a_language_models_rating_takes_short_texts_and_no_other_ratings_place(tmp_path):
    small = ("--context", 4, "--windows", 1, "--new-tokens", 1, "--output", tmp_path / "lm")
    invoke("rate", "tiny_lm", *small)
    before = (tmp_path / "lm" / "rating.json").read_bytes()
    assert "than those asked for (windows)" in " ".join(
        invoke("rate", "tiny_lm", *small, "--windows", 2, code=2).split()
    )
    assert (tmp_path / "lm" / "rating.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "has_linears"),
    [((), True), (("--preset", "small"), True), (("--linears", "none"), False), (("--preset", "none"), False)],
)
def test_a_language_model_runs_the_preset_fast_unless_told_otherwise(
    options, has_linears, wide, tmp_path, monkeypatch
):
    monkeypatch.setattr(timing, "ROUNDS", 1)
    small = (wide, *options, "--device", "cpu", "--json", "--new-tokens", 2)
    timed = invoke("time", *small, "--prompt-tokens", 16, "--timed", 1)
    rated = invoke("rate", *small, "--context", 16, "--windows", 2, "--batch", 1, "--output", tmp_path / "r")
    for found in (timed, rated):
        assert (found["linear_calls"] > 0) == has_linears and found["int8_calls"] > 0
        assert ("no linear layer" in found["verdict"]) != has_linears
    state = json.loads((tmp_path / "r" / "rating.json").read_text())
    preset = "'small'" if "small" in options else "None" if "--preset" in options else "'fast'"
    assert f"preset={preset}" in state["settings"]["options"]
    model, tokenizer = language.load(wide)
    text = language.perplexity(model, language.heldout_windows(tokenizer, 16, count=2))
    losses = [row["metrics"]["stock"]["loss"] for row in state["rows"]]
    assert losses == pytest.approx(text.losses.tolist(), abs=1e-6)  # of later batches, too


def test_a_recipe_of_16_bit_leaves_the_cache_alone_in_8_bit(tmp_path):
    small = ("--windows", 1, "--context", 32, "--new-tokens", 2, "--device", "cpu", "--output", tmp_path / "r")
    said = " ".join(invoke("rate", "tiny_lm", "--recipe", "16bit", *small).split())
    assert "no attention call and no linear layer ran in 8 bit: of attention, the cache alone is in 8 bit" in said
    assert "(linear layers: 21 layers of too few features (min_features), 1 layer outside of the blocks)" in said


def test_a_sentence_encoder_is_rated_by_its_embeddings(encoder, tmp_path, monkeypatch):
    found = invoke(
        "rate", encoder, "--windows", 3, "--batch", 2, "--device", "cpu", "--json", "--output", tmp_path / "r"
    )
    rows = json.loads((tmp_path / "r" / "rating.json").read_text())["rows"]
    model, tokenizer = language.load(encoder, encoder=True)
    windows = language.heldout_windows(tokenizer, 64, count=3)
    exact = language.embeddings(model, windows)
    with sp.apply(model, sp.SageAttnProcessor("fast", min_tokens=0)):
        ours = language.embeddings(model, windows)
    expected = 1 - torch.nn.functional.cosine_similarity(exact.double(), ours.double(), dim=-1)
    assert [row["metrics"]["int8"]["distance"] for row in rows] == pytest.approx(expected.tolist(), rel=0.1)
    assert found["worst_distance"] > found["means"]["another exact kernel"]["distance"][0] >= 0
    assert found["verdict"].startswith("Embeddings in INT8 are") and found["int8_calls"] > 0
    assert "1 - cosine to the reference" in (tmp_path / "r" / "index.html").read_text()
    monkeypatch.setattr(timing, "ROUNDS", 1)
    assert invoke("time", encoder, "--device", "cpu", "--json")["int8_calls"] > 0


def test_embeddings_are_means_over_the_tokens_that_count(encoder):
    model, _ = language.load(encoder, encoder=True)
    ids = torch.arange(5, 25)[None]
    mask = (torch.arange(20) < 12).long()[None]
    padded, short = language.embeddings(model, ids, mask), language.embeddings(model, ids[:, :12])
    assert padded.norm().item() == pytest.approx(1, abs=1e-5) and torch.allclose(padded, short, atol=1e-5)
