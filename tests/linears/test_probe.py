"""The probe compares 8-bit linear layers with the 16-bit ones, of the calls it says, and changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sage_processors as sp
from tests.diffusion.steps.test_windows import flux_pipe, options
from tests.diffusion.test_compile import denoise
from tests.linears.counting import relative_error
from tests.linears.test_modules import layer, swapped


ALL = {"linears": {"format": "int8", "min_features": 0}}


class Rows:
    """What a LinearProbe reads of its Probe."""

    on = True

    def __init__(self, rows):
        self.rows, self.place = rows, torch.tensor([3])

    def slot(self, device):
        return self.place


@pytest.mark.parametrize("k", [48, 50])
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("bias", [True, False])
def test_sums_are_those_of_the_rows_compared(format, bias, k):
    from sage_processors.linears.probe import LinearProbe
    from sage_processors.linears.probe import relative_error as of_probe

    stock, twin = layer(k, 64, bias=bias)
    x = torch.randn(2, 5, k)
    with swapped(twin, format):
        twin._sage.probe = probe = LinearProbe(Rows(100), "cpu")
        got = twin(x) + 0
        assert of_probe(probe) == pytest.approx(relative_error(got, stock(x)), rel=1e-3)
        signal, noise, rows = probe.sums[3].tolist()
        assert rows == 10 and signal == pytest.approx(stock(x).double().square().sum().item(), rel=1e-5)
        assert probe.sums.count_nonzero() == 3
        probe.shared.on = False
        twin(x)
        assert probe.sums[3, 2] == 10
        probe.shared = Rows(4)
        probe.sums.zero_()
        twin(x)
        some = (torch.arange(4) * 10) // 4
        expected = F.linear(x.flatten(0, 1)[some], stock.weight, stock.bias).double().square().sum().item()
        assert probe.sums[3, 0] == pytest.approx(expected, rel=1e-5) and probe.sums[3, 2] == 4


def test_every_layer_and_probed_step_is_compared_and_nothing_changes():
    pipe, model, inputs = flux_pipe()
    with sp.apply(pipe, options(**ALL)) as handle:
        plain = denoise(pipe, model, inputs, steps=5)
        handle.reset()
        with handle.probe(every=2, rows=8) as probe:
            assert torch.equal(denoise(pipe, model, inputs, steps=5), plain)
            rows, report = probe.linears(), handle.report().linears
            active = [row for row in report.rows if row["format"]]
            assert {row["layer"] for row in rows} == {row["layer"] for row in active}
            assert {(row["step"], row["rows"]) for row in rows} == {(step, 8) for step in (0, 2, 4)}
            assert len(rows) == 3 * len(active) and all(0.002 < row["rel_l2"] < 0.05 for row in rows)
            for row in active:
                own = [r for r in rows if r["layer"] == row["layer"]]
                whole = (sum(r["noise"] for r in own) / sum(r["signal"] for r in own)) ** 0.5
                assert row["rel_l2"] == pytest.approx(whole)
            assert "rel." in str(report)
            probe.reset()
            assert probe.linears() == []
        assert all(row["rel_l2"] is None for row in handle.report().linears.rows)
        assert "rel." not in str(handle.report())
        assert torch.equal(denoise(pipe, model, inputs, steps=5), plain)
