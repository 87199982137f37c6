"""Graphs of Mochi, whose attention asks which tokens of a text are valid: lengths follow from a mask's values."""

from __future__ import annotations

import pytest
import torch

import sage_processors as sp
from sage_processors.diffusion.graphs.model_graphs import WARM_UP
from sage_processors.diffusion.host import valid_tokens
from tests.support.cpu_graphs import StrictRecorder, captures, options
from tests.support.tiny_models import MODELS


EIGHT_BIT = {"format": "int8", "min_features": 0}
TEXT = 16


def mask_of(*rows):
    """Rows of a mask: a number of valid tokens in front, or the places of valid tokens."""
    places = torch.arange(TEXT)
    return torch.stack(
        [places < row if isinstance(row, int) else torch.isin(places, torch.tensor(row)) for row in rows]
    )


def mochi(batch=1):
    model, inputs = MODELS["mochi"]()
    return model, {name: x.repeat(batch, *[1] * (x.dim() - 1)) for name, x in inputs.items()}


def run(model, inputs, masks, first=0):
    """The results of one forward with each mask, timesteps as in a run."""
    with torch.no_grad():
        return [
            model(
                **inputs | {"encoder_attention_mask": mask, "timestep": inputs["timestep"] * (1 - (first + i) / 60)},
                return_dict=False,
            )[0]
            for i, mask in enumerate(masks)
        ]


def both(inputs_of, masks, blocks=False, **chosen):
    """Results without and with graphs, the graphs, and the recorder."""
    found = []
    for with_graphs in (False, True):
        model, inputs = inputs_of()
        with sp.apply(model, options(**chosen)) as handle:
            graphs, recorder = captures(handle, recorder=StrictRecorder()) if with_graphs else (None, None)
            if blocks and with_graphs:
                recorder.waits_in(model.proj_out)
            handle.new_run()
            found.append([x.clone() for x in run(model, inputs, masks)])
            report = handle.report()
    return *found, graphs, recorder, report


def same(found, wanted):
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("linears", [None, EIGHT_BIT], ids=["attention", "linears"])
def test_mochi_is_captured_and_replayed_with_the_same_bits(blocks, linears):
    mask = mask_of(13)
    chosen = {} if linears is None else {"linears": linears}
    wanted, found, graphs, recorder, report = both(mochi, [mask] * (WARM_UP + 4), blocks, **chosen)
    assert same(found, wanted) and not graphs.differing
    if blocks:
        assert graphs.partly == 3 and graphs.block_replays == 6 and "proj_out" not in str(graphs.failures.lines)
    else:
        assert graphs.replays == 4 and graphs.eager == {"warm_up": WARM_UP} and recorder.captures == 1
    assert recorder.mode.refused == 0 and report.calls


def test_a_run_with_changing_masks_is_never_another_ones():
    """Equal numbers of valid tokens replay one graph, wherever the tokens are; others have graphs of their own."""
    ragged = mask_of([0, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 14, 15])
    other = mask_of(7)
    masks = [mask_of(13)] * (WARM_UP + 2) + [ragged, mask_of(13), ragged, other, other, other, ragged]
    masks += [mask_of(0)] * 3 + [mask_of(TEXT)] * 3 + [mask_of(13).long(), mask_of(13)]
    wanted, found, graphs, recorder, _ = both(mochi, masks, linears=EIGHT_BIT)
    assert same(found, wanted) and not graphs.differing
    assert recorder.captures == 4 and graphs.eager == {"warm_up": WARM_UP + 4}  # int64 is another kind, seen once
    assert graphs.replays == len(masks) - WARM_UP - 4
    assert not torch.equal(found[WARM_UP + 2], found[WARM_UP + 1])


def test_rows_of_a_batch_have_their_own_numbers():
    masks = [mask_of(13, 5)] * (WARM_UP + 2) + [mask_of(5, 13)] * 3 + [mask_of([1, 2, 3, 7, 9], 13)] * 2
    wanted, found, graphs, recorder, _ = both(lambda: mochi(2), masks)
    assert same(found, wanted) and recorder.captures == 2
    assert graphs.eager == {"warm_up": WARM_UP + 1} and not graphs.differing


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_a_mask_that_is_written_to_is_read_again(inference):
    """In inference mode no writes are counted, so its values are read in each forward."""
    found = []
    for with_graphs in (False, True):
        model, inputs = mochi()
        with sp.apply(model, options()) as handle, torch.inference_mode(inference):
            mask = mask_of(13)
            if with_graphs:
                graphs, _ = captures(handle, recorder=StrictRecorder())
            handle.new_run()
            outs = run(model, inputs, [mask] * (WARM_UP + 2))
            mask[:, 4] = False
            outs += run(model, inputs, [mask] * 3, first=WARM_UP + 2)
            mask[:, 4], mask[:, 2] = True, False
            outs += run(model, inputs, [mask], first=WARM_UP + 5)
            found.append([x.clone() for x in outs])
    assert same(*found) and graphs.eager["warm_up"] == WARM_UP + 1 and graphs.replays == 5


def test_the_host_reads_an_unchanged_mask_once(monkeypatch):
    reads, tolist = [], torch.Tensor.tolist
    mask = mask_of(13)
    counted = valid_tokens.MaskCounts()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x) or tolist(x))
    for _ in range(3):
        assert counted.of(iter([torch.zeros(2, 3), mask])) == ((1, (13,)),)
    assert len(reads) == 1
    mask[0, 0] = False
    assert counted.of(iter([mask])) == ((0, (12,)),) and len(reads) == 2


def test_a_mask_that_the_capture_does_not_know_is_counted_and_eager(caplog):
    """As of a model that makes another mask of the one it is given."""
    found = []
    for with_graphs in (False, True):
        model, inputs = mochi()
        for block in model.transformer_blocks:
            with_copied_mask(block.attn1)
        with sp.apply(model, options()) as handle:
            if with_graphs:
                graphs, recorder = captures(handle, recorder=StrictRecorder())
            handle.new_run()
            found.append(run(model, inputs, [mask_of(13)] * (WARM_UP + 4)))
            report = str(handle.report())
    assert same(*found) and graphs.replays == graphs.partly == 0 and recorder.mode.refused
    assert graphs.eager["not_capturable"] >= 1 and "not captured:" in report
    assert sum("aten.nonzero" in record.getMessage() for record in caplog.records) == 2  # the whole, and a block


def with_copied_mask(attention):
    forward = attention.forward
    attention.forward = lambda *args, attention_mask, **kwargs: forward(
        *args, attention_mask=attention_mask.clone(), **kwargs
    )


def test_indices_are_those_of_nonzero():
    torch.manual_seed(0)
    for _ in range(20):
        mask = torch.rand(3, TEXT) < torch.rand(3, 1)
        known = valid_tokens.KnownRows([(mask, tuple(mask.sum(1).tolist()))])
        for row in mask:
            assert torch.equal(known.indices(row[None, :].flatten()), torch.nonzero(row, as_tuple=False))
        assert known.indices(mask[0].clone()) is None and known.indices(mask[0, 1:]) is None


def test_a_replaced_nonzero_is_not_passed_over(monkeypatch):
    mask, own = mask_of(13), torch.nonzero
    seen = []
    run_known = valid_tokens.run_with_known_rows(lambda: valid_tokens.nonzero(mask[0]), [(mask, (13,))])
    assert torch.equal(run_known(), own(mask[0]))
    monkeypatch.setattr(torch, "nonzero", lambda *args, **kwargs: seen.append(args) or own(*args, **kwargs))
    assert torch.equal(run_known(), own(mask[0])) and len(seen) == 1
