"""Short forms of many layer names: a common prefix, and patterns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def common_prefix(names: Sequence[str]) -> str:
    """Return the longest common prefix of dotted names, in whole components; "" if there is none.

    "unet" for "unet.mid.attn" and "unet.up.0.attn". The last component is never part of it. Nor is the name of a list
    in front of its numbers: the prefix of "layers.0" and "layers.1" is "".
    """
    pieces = [name.split(".") for name in names]
    if not pieces:
        return ""
    least = min(map(len, pieces)) - 1
    shared = 0
    while shared < least and len({each[shared] for each in pieces}) == 1:
        shared += 1
    while shared and any(each[shared].isdecimal() for each in pieces):
        shared -= 1
    return ".".join(pieces[0][:shared])


def patterns(names: Iterable[str]) -> dict[str, list[str]]:
    """Return a few patterns for exactly these names: {"blocks.0-2.attn": ["blocks.0.attn", …]}.

    Numbers become ranges, "0-2,5" or "attn1-2"; words become lists, "{to_q,to_k}". A pattern never
    covers a name that is not there.
    """
    merged = [tuple((piece,) for piece in name.split(".")) for name in dict.fromkeys(names)]
    # Numbers are merged first, so that equal layers of one list of blocks stay together.
    for numbers in (True, False):
        for place in reversed(range(max(map(len, merged), default=0))):
            merged = _merged(merged, place, numbers)
    return {".".join(_piece(choice) for choice in pattern): _expanded(pattern) for pattern in merged}


def _merged(found: list, place: int, numbers: bool) -> list:
    """Merge patterns that differ only at the index `place`.

    Args: numbers: merge those with a number there; False: those with a word.
    """
    together: dict = {}
    for pattern in found:
        if len(pattern) <= place or pattern[place][0].isdecimal() != numbers:
            together[pattern] = [pattern]
        else:
            together.setdefault((pattern[:place], None, pattern[place + 1 :]), []).append(pattern)
    return [
        (*same[0][:place], tuple(piece for pattern in same for piece in pattern[place]), *same[0][place + 1 :])
        if len(same) > 1
        else same[0]
        for same in together.values()
    ]


def _piece(choice: tuple[str, ...]) -> str:
    if len(choice) == 1:
        return choice[0]
    stems = {word.rstrip("0123456789") for word in choice}
    numbers = [word[len(next(iter(stems))) :] for word in choice] if len(stems) == 1 else []
    if not numbers or not all(number == str(int(number or -1)) for number in numbers):
        return "{" + ",".join(choice) + "}"
    return stems.pop() + _ranges(sorted(map(int, numbers)))


def _ranges(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _expanded(pattern) -> list[str]:
    names = [""]
    for choice in pattern:
        names = [f"{name}.{piece}" if name else piece for name in names for piece in choice]
    return names
