"""The text that the small language model is trained on, its tokenizer, and a bigram model to compare with.

Four kinds of documents, all of which may be redistributed:

    topics      Python's language reference as shipped in pydoc_data (PSF licence)
    docs        signatures and docstrings of the standard library's modules (PSF licence)
    code        the modules themselves (PSF licence)
    dialogues   made up by tiny_dialogues (Apache-2.0)

Files whose copyright lines name anyone but the Python Software Foundation are left out. The split into training and
held-out text is by document and depends on its name alone, so it is the same for every version of Python.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tiny_dialogues
import torch
from tiny_dialogues import ASSISTANT, END, USER


KINDS = ("topics", "docs", "code", "dialogues")
PAD = "<|pad|>"
HELDOUT_ONE_IN = 16  # documents
DIALOGUES = 40_000
DOCUMENT_CHARACTERS = 60_000  # of a longer file, the first ones
LEAVE_OUT = {
    "__pycache__", "ensurepip", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests",
    "turtledemo",
}  # fmt: skip
OTHER_COPYRIGHT = re.compile(r"copyright\s*(\(c\)|©|\d{4}|:)", re.IGNORECASE)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{% if message['role'] == 'user' %}}{USER}{{{{ message['content'] }}}}"
    f"{{% elif message['role'] == 'assistant' %}}{ASSISTANT}{{{{ message['content'] }}}}{END}"
    "{% else %}{{ raise_exception('this model knows the roles user and assistant') }}{% endif %}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)


@dataclass(frozen=True)
class Document:
    """One text. kind: of KINDS. name: what the split goes by; the docs and the code of a module share it."""

    kind: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "big") % HELDOUT_ONE_IN == 0


def corpus(dialogues: int = DIALOGUES) -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents from the running Python and `dialogues` made-up ones; no text comes twice.

    Raises: RuntimeError where this Python lacks the sources of its standard library.
    """
    seen, parts = set(), ([], [])
    for document in (*topics(), *modules(), *made_up(dialogues)):
        if document.text not in seen:
            seen.add(document.text)
            parts[document.held_out].append(document)
    missing = set(KINDS) - {document.kind for document in parts[0]}
    if missing:
        raise RuntimeError(f"this Python has no text for {sorted(missing)}: install its standard library's sources")
    return parts


def topics() -> Iterator[Document]:
    from pydoc_data.topics import topics as texts

    for name in sorted(texts):
        yield Document("topics", f"topic {name}", texts[name].strip())


def made_up(count: int) -> Iterator[Document]:
    for number, text in enumerate(tiny_dialogues.dialogues(seed=0, count=count)):
        yield Document("dialogues", f"dialogue {number}", text.removesuffix(END))


def modules() -> Iterator[Document]:
    """Docs and code of every module whose copyright is the Python Software Foundation's."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        if LEAVE_OUT & set(where.parts) or where.parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        with tokenize.open(path) as file:
            code = file.read().strip()
        if any(OTHER_COPYRIGHT.search(line) and "Python Software" not in line for line in code.splitlines()):
            continue
        name = f"module {where.with_suffix('').as_posix().replace('/', '.')}"
        yield Document("code", name, code[:DOCUMENT_CHARACTERS])
        docs = "\n\n".join(docstrings(ast.parse(code), name))
        if len(docs) > 200:
            yield Document("docs", name, docs[:DOCUMENT_CHARACTERS])


def docstrings(node: ast.AST, title: str) -> Iterator[str]:
    """The docstring under its title, then those of everything defined inside, under their signatures."""
    text = ast.get_docstring(node)
    if text:
        yield f"{title}\n{text}"
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from docstrings(child, f"class {child.name}")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from docstrings(child, f"{child.name}({ast.unparse(child.args)})")


def train_tokenizer(documents: Sequence[Document], vocabulary: int = 4096):
    """Byte-level BPE as a transformers tokenizer with a chat template; digits stay apart, so that sums can be learnt.

    Args: documents: training text only. vocabulary: tokens, the special ones included.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    plain = re.compile("|".join(map(re.escape, (END, USER, ASSISTANT))))
    inner.train_from_iterator((plain.sub("\n", document.text) for document in documents), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode(tokenizer, documents: Sequence[Document]) -> dict[str, torch.Tensor]:
    """{kind: its documents as one stream of token ids, int32 [N]}; every document ends with the end token."""
    end, streams = tokenizer.eos_token_id, {}
    for kind in KINDS:
        texts = [document.text for document in documents if document.kind == kind]
        if texts:
            ids = tokenizer(texts, return_attention_mask=False).input_ids
            streams[kind] = torch.tensor([token for row in ids for token in (*row, end)], dtype=torch.int32)
    return streams


class Bigram:
    """P(next | token), interpolated with P(next) and the uniform distribution after Witten and Bell.

    A context that was followed by few different tokens is trusted more: its weight is count / (count + kinds).

    Args: tokens: int [N], the training stream. vocabulary: ids lie in [0, vocabulary).
    """

    def __init__(self, tokens: torch.Tensor, vocabulary: int):
        tokens = tokens.long()
        self.vocabulary = vocabulary
        single = torch.bincount(tokens, minlength=vocabulary).double()
        trust = len(tokens) / (len(tokens) + (single > 0).sum().item())
        self.unigram = trust * single / len(tokens) + (1 - trust) / vocabulary
        self.pairs, self.counts = torch.unique(tokens[:-1] * vocabulary + tokens[1:], return_counts=True)
        before = self.pairs // vocabulary
        self.total = torch.zeros(vocabulary, dtype=torch.float64).index_add_(0, before, self.counts.double())
        self.kinds = torch.bincount(before, minlength=vocabulary).double()

    def loss(self, tokens: torch.Tensor) -> float:
        """Mean -log P of tokens[1:] given the token before, in nats; tokens: int [N] or windows [B, N]."""
        tokens = tokens.long()
        before, after = tokens[..., :-1].flatten(), tokens[..., 1:].flatten()
        wanted = before * self.vocabulary + after
        place = torch.searchsorted(self.pairs, wanted).clamp(max=len(self.pairs) - 1)
        count = torch.where(self.pairs[place] == wanted, self.counts[place], 0).double()
        kinds, total = self.kinds[before], self.total[before]
        seen = (count + kinds * self.unigram[after]) / (total + kinds)
        return -torch.where(total > 0, seen, self.unigram[after]).log().mean().item()
