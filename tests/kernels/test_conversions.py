"""INT32 scores as floats without a conversion: where each way is exact, over every integer that a score can be."""

from __future__ import annotations

import math

import pytest
import torch

from sage_kernels.facts.recipe import INT8_MAX
from tests.support.repository import ROOT


MAGIC = 1.5 * 2.0**23  # kernels: ROUND_MAGIC
LARGEST = 256 * INT8_MAX**2  # |q·k| of 256 channels
EVERY = torch.arange(-LARGEST, LARGEST + 1, dtype=torch.int32)
# Scales of a tile, base 2: of ordinary inputs, of outliers, and near the largest that kernels fold (ADDED_BITS_LIMIT)
SCALES = (1.6e-4, 2e-3, 0.03, 0.06)


def bits_of(magic: float) -> int:
    return int(torch.tensor(magic).view(torch.int32))


def added(scores: torch.Tensor, magic: float) -> torch.Tensor:
    """The float whose bits are those of `magic` plus the score."""
    return (scores + bits_of(magic)).view(torch.float32)


def test_native_conversion_is_exact_to_two_to_the_24():
    assert torch.equal(EVERY.float().to(torch.int32), EVERY)
    assert int(torch.tensor(2**24 + 1, dtype=torch.int32).float()) != 2**24 + 1


@pytest.mark.parametrize("magic, lowest, highest", [(MAGIC, -(2**22), 2**22), (MAGIC - 1, 1 - 2**22, 2**22 + 1)])
def test_adding_bits_is_exact_in_this_range_and_no_further(magic, lowest, highest):
    """1.5·2^23, and LiteAttention's number, one less: both hold every score of up to 256 channels without -128."""
    assert lowest <= -LARGEST and LARGEST <= highest
    every = torch.arange(lowest, highest + 1, dtype=torch.int32)
    assert torch.equal(added(every, magic) - magic, every.float())
    outside = torch.tensor([lowest - 1, highest + 1], dtype=torch.int32)
    assert (added(outside, magic) - magic != outside.float()).all()


def test_largest_integer_is_the_largest_float():
    """Order is kept, by the conversion and by the bits: a maximum may be taken on either, if one scale is shared."""
    for floats in (EVERY.float(), added(EVERY, MAGIC)):
        assert (floats[1:] > floats[:-1]).all()
    # with a scale a key it is another one: the largest of the products is not that of the integers
    scores, scales = torch.tensor([100, 90]), torch.tensor([0.1, 0.2])
    assert scores.argmax() != (scores * scales).argmax()


def exponent_errors(scale: float) -> tuple[float, float, float]:
    """Largest errors of the exponent s·c - m: naive, corrected, and of a plain FMA of the converted score.

    Over every s whose weight is 2^-32 of the row's largest or more, m = 64 the score of that one. Naive: fma(f, c,
    -fl(M·c + m)), whose subtrahend is rounded. Corrected: m is then the number that it stands for.
    """
    c = torch.tensor(scale)
    highest = min(int(64 / scale), LARGEST)
    scores = torch.arange(highest - int(32 / scale), highest + 1, dtype=torch.int32)
    m = (highest * c.double()).float()
    against = (MAGIC * c.double() + m.double()).float()
    stands_for = (against.double() - MAGIC * c.double()).float()
    folded = (added(scores, MAGIC).double() * c.double() - against.double()).float()  # one rounding, as an FMA
    plain = (scores.double() * c.double() - m.double()).float()

    def worst(exponents: torch.Tensor, reference: torch.Tensor) -> float:
        return float((exponents.double() - (scores.double() * c.double() - reference.double())).abs().max())

    return worst(folded, m), worst(folded, stands_for), worst(plain, m)


@pytest.mark.parametrize("scale", SCALES)
def test_folded_form_is_as_exact_as_a_plain_fma_once_the_reference_is_what_was_subtracted(scale):
    naive, corrected, plain = exponent_errors(scale)
    ulp = 2.0 ** (math.frexp(MAGIC * scale + 64)[1] - 24)  # of what is subtracted
    assert naive <= ulp / 2 + plain
    assert corrected <= plain + 64 * 2.0**-24  # what is left is the rounding of m itself
    assert naive > 4 * corrected  # so it is worth its instruction


def test_the_notes_have_the_errors_that_are_computed():
    notes = (ROOT / "kernels" / "NOTES.md").read_text(encoding="utf-8")
    for scale, said in zip(SCALES, ("1.6e-4", "2e-3", "0.03", "0.06"), strict=True):
        cells = (f"{error:.1e}".replace("e-0", "e-") for error in exponent_errors(scale))
        assert f"| {said} | {' | '.join(cells)} |" in notes, scale
