"""The embedded language model is real, small, and learnt more than pairs of tokens; its text is what it says it is."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch


pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from sage_processors.evaluation import language
from tests.support.repository import ROOT


sys.path.insert(0, str(ROOT / "examples"))

import tiny_dialogues
import tiny_text


FOLDER = language.EMBEDDED
MAX_WEIGHT_BYTES, MAX_OTHER_BYTES = 16_000_000, 1_000_000
DIALOGUES = 4000  # of the 40,000 that training reads: enough for a bigram model


@pytest.fixture(scope="module")
def loaded():
    return language.load()


@pytest.fixture(scope="module")
def training_text():
    return tiny_text.corpus(DIALOGUES)[0]


@pytest.fixture(scope="module")
def heldout():
    return json.loads((FOLDER / "heldout.json").read_text())


# --- the folder ---


def test_folder_is_small_and_holds_nothing_that_runs():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".safetensors", ".md", ".txt"}
    weights = [file for file in files if file.suffix == ".safetensors"]
    assert sum(file.stat().st_size for file in weights) <= MAX_WEIGHT_BYTES
    assert sum(file.stat().st_size for file in set(files) - set(weights)) <= MAX_OTHER_BYTES
    assert not any(file.stat().st_mode & 0o111 for file in files)


def test_weights_are_stored_fp16():
    from safetensors import safe_open

    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}


def test_plain_loading_gives_a_llama_with_grouped_heads_of_64():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    assert config.head_dim == 64 and config.num_attention_heads >= 2 * config.num_key_value_heads > 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert config.max_position_embeddings >= 512 and tokenizer.model_max_length == config.max_position_embeddings
    assert len(tokenizer) == config.vocab_size and tokenizer.eos_token_id == config.eos_token_id


def test_licence_and_source_are_stated():
    readme, licence = (FOLDER / "README.md").read_text(), (FOLDER / "LICENSE-PYTHON.txt").read_text()
    assert "LICENSE-PYTHON.txt" in readme and all(kind in readme for kind in tiny_text.KINDS)
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence


# --- tokenizer ---


@pytest.mark.parametrize(
    "text", ["", " two  spaces\n\tand a tab ", "naïve — 数字 12345 🦉", "def f(x):\n    return x[0]"]
)
def test_tokenizer_gives_back_any_text(loaded, text):
    ids = loaded[1](text).input_ids
    assert loaded[1].decode(ids) == text and all(0 <= i < len(loaded[1]) for i in ids)


def test_chat_template_writes_what_the_dialogues_have(loaded):
    exchanges = [("Hello!", "Hello! How can I help you?"), ("Thank you.", "You are welcome!")]
    said = [{"role": r, "content": c} for e in exchanges for r, c in zip(("user", "assistant"), e, strict=True)]
    assert loaded[1].apply_chat_template(said, tokenize=False) == tiny_dialogues.conversation(exchanges)
    with pytest.raises(Exception, match="roles user and assistant"):
        loaded[1].apply_chat_template([{"role": "system", "content": "no"}], tokenize=False)


# --- what it learnt ---


def test_recorded_losses_are_those_of_the_shipped_weights(loaded):
    model, tokenizer = loaded
    recorded = json.loads((FOLDER / "metrics.json").read_text())
    assert recorded["parameters"] == sum(p.numel() for p in model.parameters())
    windows = language.heldout_windows(tokenizer, model.config.max_position_embeddings, kinds=("topics",))
    measured = math.log(language.perplexity(model, windows).value)
    assert recorded["heldout_loss_nats_per_token"]["model"]["topics"] == pytest.approx(measured, abs=2e-3)


def test_answers_what_it_was_taught_and_stops(loaded):
    model, tokenizer = loaded
    days, right = tiny_dialogues.DAYS, 0
    for day, after in zip(days, [*days[1:], days[0]], strict=True):
        ids = language.chat_ids(tokenizer, f"Which day comes after {day}?")
        answer = tokenizer.decode(model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :])
        right += answer == f"{after} comes after {day}.{tiny_dialogues.END}"
    assert right >= 6


# --- corpus ---


def test_held_out_documents_are_none_of_the_training_documents(training_text, heldout):
    names, texts = {d.name for d in training_text}, {d.text for d in training_text}
    assert {document["kind"] for document in heldout} == set(tiny_text.KINDS)
    assert not names & {document["name"] for document in heldout}
    assert not texts & {document["text"] for document in heldout}
    assert not any(document.held_out for document in training_text)
    assert all(tiny_text.Document(d["kind"], d["name"], d["text"]).held_out for d in heldout)


def test_text_with_another_copyright_is_left_out(training_text, heldout):
    python = [d.text for d in training_text if d.kind in ("docs", "code")]
    python += [d["text"] for d in heldout if d["kind"] in ("docs", "code")]
    named = [line for text in python for line in text.splitlines() if tiny_text.OTHER_COPYRIGHT.search(line)]
    assert all("Python Software" in line for line in named)
    assert not any(name in "\n".join(python) for name in ("Secret Labs", "Vinay Sajip <", "Google, Inc."))
