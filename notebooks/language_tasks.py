"""Tasks for language models like those of RULER (arXiv:2404.06654): facts hidden in a long text, and questions.

Models of some hundred million parameters can do the easiest kinds alone. All facts are in one text and every question
continues a copy of the cache behind it, so that one prompt answers many questions.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


NAMES = "Anna David Emma Frank George Henry Jack Kate Lucy Maria Mark Mary Paul Peter Sarah Tom Alice Bob Jane James"
TOWNS = "Berlin Boston Cairo Chicago Delhi Dublin London Madrid Milan Moscow Paris Prague Rome Sydney Tokyo Vienna"
FRUIT = "apples bananas cherries dates figs grapes lemons melons nuts olives onions pears plums rice tea tomatoes"
QUESTIONS = 8  # of each kind about one text
NEW_TOKENS = 6  # of an answer


class Task(NamedTuple):
    """One kind of question: what the text says, what is asked, and the right answers."""

    facts: list[str]
    questions: list[str]
    answers: list[str]


def tasks_of(seed: int, names: list[str]) -> dict[str, Task]:
    """Draw the facts and questions of each kind with a seed.

    numbers and towns: a needle among eight of its form. list: the next item of a chain. two steps: needs two facts.
    """
    draw = random.Random(seed)
    drawn = draw.sample(names, 2 * QUESTIONS)
    people, friends = drawn[:QUESTIONS], drawn[QUESTIONS:]
    numbers = [str(number) for number in draw.sample(range(1000, 10000), QUESTIONS)]
    towns, fruit = draw.sample(TOWNS.split(), QUESTIONS), draw.sample(FRUIT.split(), QUESTIONS)
    chain = list(itertools.pairwise([*fruit, fruit[0]]))
    return {
        "numbers": Task(
            [f"The secret number of {name} is {number}." for name, number in zip(people, numbers, strict=True)],
            [f"The secret number of {name} is" for name in people],
            numbers,
        ),
        "towns": Task(
            [f"The home town of {name} is {town}." for name, town in zip(people, towns, strict=True)],
            [f"The home town of {name} is" for name in people],
            towns,
        ),
        "list": Task(
            [" ".join(f"After {a} come {b}." for a, b in chain)],
            [f"After {a} come" for a, _ in chain],
            [b for _, b in chain],
        ),
        "two steps": Task(
            [f"{friend} lives in the home town of {name}." for friend, name in zip(friends, people, strict=True)],
            [f"{friend} lives in" for friend in friends],
            towns,
        ),
    }


def single_token_names(tokenizer: Any) -> list[str]:
    """Return the names that are one token behind a space: questions are then equally long."""
    return [x for x in NAMES.split() if len(tokenizer(f" {x}", add_special_tokens=False).input_ids) == 1]


def haystack(tokenizer: Any, prose: str, tasks: dict[str, Task], tokens: int, seed: int) -> list[int]:
    """Return the ids of lines of prose with all facts between them in random places, of about so many tokens."""
    facts = [fact for task in tasks.values() for fact in task.facts]
    lines = [line.strip() for line in prose.splitlines() if len(line) > 40]
    left = tokens - len(tokenizer("\n".join(facts), add_special_tokens=False).input_ids)
    start = (seed * 211) % max(1, len(lines) - 600)
    kept: list[str] = []
    for line in lines[start:] + lines[:start]:
        left -= len(tokenizer(line + "\n", add_special_tokens=False).input_ids)
        if left < 0:
            break
        kept.append(line)
    draw = random.Random(seed)
    for fact in facts:
        kept.insert(draw.randrange(len(kept) + 1), fact)
    ids: list[int] = tokenizer("\n".join(kept) + "\n\n", add_special_tokens=False).input_ids
    return ids


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, text: list[int], tasks: dict[str, Task], cache: Callable[[], Any], part: int
) -> Iterator[tuple[str, int, str, bool]]:
    """Yield (kind, number, greedy continuation, whether it begins with the right answer) for every question.

    Args: text: ids of the haystack, read in parts of so many tokens. cache: makes an empty KV cache.
    """
    behind = cache()
    for ids in torch.tensor([text]).split(part, 1):
        model(ids, past_key_values=behind, use_cache=True, logits_to_keep=1)
    for kind, task in tasks.items():
        for numbers in _of_one_length(tokenizer, task.questions):
            asked = [tokenizer(task.questions[i], add_special_tokens=False).input_ids for i in numbers]
            own = copy.deepcopy(behind)
            own.batch_repeat_interleave(len(numbers))
            ids, found = torch.tensor(asked), []
            for _ in range(NEW_TOKENS):
                logits = model(ids, past_key_values=own, use_cache=True, logits_to_keep=1).logits
                ids = logits[:, -1:].argmax(-1)
                found.append(ids)
            for i, row in zip(numbers, torch.cat(found, 1), strict=True):
                said = tokenizer.decode(row)
                yield kind, i, said, said.strip().startswith(task.answers[i])


def _of_one_length(tokenizer: Any, questions: list[str]) -> list[list[int]]:
    """Return the numbers of questions in groups of equally many tokens."""
    lengths = [len(tokenizer(question, add_special_tokens=False).input_ids) for question in questions]
    return [[i for i, x in enumerate(lengths) if x == length] for length in sorted(set(lengths))]
