"""Prompts to rate a checkpoint with: categories as in DrawBench, in words of our own."""

from __future__ import annotations

from pathlib import Path


PROMPTS = {
    "colours": (
        "a green horse beside a pink barn",
        "a yellow umbrella under a purple sky",
        "a blue strawberry on a white plate",
        "an orange cat with one black ear",
    ),
    "counting": (
        "three candles in a row on a wooden shelf",
        "five sailing boats on a calm lake",
        "two owls and one squirrel on a branch",
        "four red mugs on a windowsill",
    ),
    "positions": (
        "a lamp to the left of a sofa, a plant to the right of it",
        "a small dog on top of a large turtle",
        "a bicycle in front of a bakery",
        "a fork below a spoon on a grey cloth",
    ),
    "writing": (
        'a shop sign that reads "OPEN AT NINE"',
        'a chalkboard with the word "gravity" on it',
        'a birthday cake with the name "Mira" in icing',
        'a road sign that says "SLOW"',
    ),
    "people": (
        "a portrait of an old fisherman in the evening light",
        "two children who build a sand castle",
        "a violinist on a stage, seen from the side",
        "the hands of a potter at the wheel",
    ),
    "details": (
        "a macro photograph of a dragonfly with drops of dew on its wings",
        "a wide street market at night with hundreds of lanterns",
        "the inside of a mechanical watch",
        "a forest floor with moss, ferns and mushrooms",
    ),
    "styles": (
        "a lighthouse in a storm, as an ink drawing",
        "a city of glass in the style of a travel poster",
        "a fox in the snow, watercolour on rough paper",
        "a blueprint of a flying machine",
    ),
    "unusual": (
        "an astronaut who waters tomatoes on the moon",
        "a piano made of ice in a desert",
        "a snail that carries a small library on its back",
        "a train that runs through a living room",
    ),
}


def built_in(count: int, categories: list[str] | None = None) -> list[tuple[str, str]]:
    """Return `count` pairs (category, prompt), one category after the other and then again.

    categories: some of PROMPTS; None: all. Beyond the number of prompts they repeat.
    """
    names = categories or list(PROMPTS)
    return [(names[i % len(names)], PROMPTS[names[i % len(names)]][i // len(names) % 4]) for i in range(count)]


def from_file(path: Path, count: int | None = None) -> list[tuple[str, str]]:
    """Return pairs ("", prompt) of a text file with one prompt a line.

    count: only the first ones. Raises: ValueError.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a byte order mark
        lines = [line.strip() for line in text.splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} could not be read: {error}") from error
    if not lines:
        raise ValueError(f"{path} has no prompts, expected one a line")
    return [("", line) for line in lines[:count]]
