"""Held-out text for the models of others: plain, as their own tokenizers begin a text, without our model's markup."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch


transformers = pytest.importorskip("transformers")

from sage_kernels.results import read_rows  # noqa: E402
from sage_processors import pipelines  # noqa: E402
from sage_processors.evaluation import language  # noqa: E402
from tests.support.repository import ROOT  # noqa: E402


MARKUP = ("<|user|>", "<|assistant|>", "<|end|>")


def raw(kind: str) -> list[str]:
    documents = json.loads((Path(pipelines.folder("tiny_lm")) / "heldout.json").read_text())
    return [document["text"] for document in documents if document["kind"] == kind]


@pytest.fixture(scope="module")
def own():
    return transformers.AutoTokenizer.from_pretrained(pipelines.folder("tiny_lm"))


@pytest.fixture(scope="module")
def other():
    """A tokenizer of words as other people's are: <s> in front of a text, and a chat template of its own."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word for kind in language.KINDS for text in raw(kind) for word in text.replace("|>", "|> ").split()}
    words |= {word.partition("<|")[0] for word in words} | {"<turn>", "user:", "assistant:", "a"}
    names = ["<s>", "</s>", "<unk>", *sorted(words)]
    plain = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}<turn> {{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    return made


def test_our_model_reads_dialogues_in_its_own_markup(own):
    """As they are in the file: what is measured of it today is what was."""
    ids = [token for text in raw("dialogues") for token in (*own(text).input_ids, own.eos_token_id)]
    expected = torch.tensor(ids[: len(ids) // 96 * 96]).view(-1, 96)
    for chat in (False, True):
        assert torch.equal(language.heldout_windows(own, 96, kinds=("dialogues",), chat=chat), expected)


@pytest.mark.slow("32 windows of 512 tokens")
def test_the_committed_perplexity_of_our_model_comes_out_again():
    rows = read_rows(ROOT / "kernels" / "benchmarks" / "results.csv")
    found = [row for row in rows if (row["case"], row["metric"]) == ("tiny_lm/stock", "perplexity")]
    model, tokenizer = language.load()
    for row in found[-1:]:
        windows = language.heldout_windows(tokenizer, int(row["seq_q"]), count=int(row["batch"]))
        assert language.perplexity(model, windows).value == pytest.approx(float(row["median"]), rel=1e-4)


@pytest.mark.parametrize("chat", [False, True])
def test_other_models_read_no_markup_of_ours(other, chat):
    windows = language.heldout_windows(other, 64, chat=chat)
    text = other.decode(windows[language.heldout_windows(other, 64, kinds=language.KINDS[:3]).shape[0] :].flatten())
    assert not any(mark in text for mark in MARKUP) and (other("<turn>").input_ids[1] in windows) == chat
    assert ("user:" in text) == chat and "Can you tell me a story" in text


def test_every_window_begins_as_a_text_of_that_tokenizer(other, own):
    windows = language.heldout_windows(other, 64, count=7)
    assert (windows[:, 0] == other.bos_token_id).all() and (windows[:, 1:] != other.bos_token_id).all()
    assert windows.shape == (7, 64) and (language.heldout_windows(other, 64) == other.eos_token_id).any()
    first = other(raw("topics")[0]).input_ids[:64]
    assert windows[0].tolist() == first
    assert language.heldout_windows(own, 64)[0].tolist() == own(raw("topics")[0]).input_ids[:64]


def test_a_chat_template_is_asked_for_where_there_is_none(other):
    other.chat_template, kept = None, other.chat_template
    try:
        assert language.heldout_windows(other, 64, count=1).shape == (1, 64)
        with pytest.raises(ValueError, match="chat: got True and a tokenizer without a chat template"):
            language.heldout_windows(other, 64, chat=True)
    finally:
        other.chat_template = kept
    with pytest.raises(ValueError, match="length: got 2, expected at least 3"):
        language.heldout_windows(other, 2)
