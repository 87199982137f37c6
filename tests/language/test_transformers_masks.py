"""What the mask function leaves out, the attention function puts back: cell by cell as in transformers' masks."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from transformers import masking_utils as mu

from sage_processors.language.call import Call, masking
from sage_processors.language.masks import UNLIMITED, BandMask, sage_mask


def seen_by_the_op(mask, q_length, kv_length, *, is_causal):
    """bool [B or 1, 1, q, kv]: what the op shows, from the arguments that our attention function gives it."""
    call = Call(torch.nn.Identity(), mask, 0.0, None, is_causal, None, None, None, None, False, {})
    attn_mask, causal, window, keys = masking(call, q_length, kv_length)
    if attn_mask is not None:
        assert not causal and window is None and not isinstance(attn_mask, BandMask)
        return attn_mask
    row = torch.arange(q_length)[:, None] + (keys - q_length if causal == "bottom_right" else 0)
    key = torch.arange(kv_length)
    seen = (key < keys).expand(q_length, -1)
    if causal:
        seen = seen & (key <= row)
    if window is not None:
        seen = seen & ((row - key).abs() < window)
    return seen[None, None]


def both(is_causal, **arguments):
    """(what the op shows, what transformers' mask shows) for one call of a mask function."""
    q_length, kv_length = arguments["q_length"], arguments["kv_length"]
    mask = sage_mask(**arguments)
    if mask is not None:
        assert mask.shape == (arguments["batch_size"], 1, q_length, kv_length) and mask.dtype == torch.bool
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    wanted = mu.sdpa_mask(**(arguments | skips))
    seen = seen_by_the_op(mask, q_length, kv_length, is_causal=is_causal)
    return torch.broadcast_to(seen, wanted.shape), wanted, mask


PADDINGS = {"none": None, "nothing": (), "left": (0, 1), "right": (-2, -1), "inside": (3,)}


def padding(kind, length):
    if PADDINGS[kind] is None:
        return None
    mask = torch.ones(2, length, dtype=torch.bool)
    for position in PADDINGS[kind]:
        mask[0, max(-length, min(position, length - 1))] = False
    return mask


LENGTHS = [  # q_length, kv_length, q_offset, kv_offset: prefill, decode, chunk, static caches, full sliding caches
    (9, 9, 0, 0), (1, 1, 0, 0), (1, 9, 8, 0), (4, 13, 9, 0), (9, 16, 0, 0), (4, 16, 5, 0), (1, 16, 5, 0),
    (1, 5, 9, 5), (4, 8, 9, 5), (2, 6, 11, 7),
]  # fmt: skip
FUNCTIONS = {
    "causal": (mu.causal_mask_function, None),
    "window5": (mu.sliding_window_causal_mask_function(5), 5),
    "window1": (mu.sliding_window_causal_mask_function(1), 1),
    "window99": (mu.sliding_window_causal_mask_function(99), 99),
    "chunked": (mu.chunked_causal_mask_function(5, torch.tensor([0, 1])), 5),
}


@pytest.mark.parametrize("tensor_offset", [False, True])
@pytest.mark.parametrize("kind", PADDINGS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_causal_masks_are_transformers_own(name, kind, tensor_offset):
    function, local_size = FUNCTIONS[name]
    for (q_length, kv_length, q_offset, kv_offset), skip in itertools.product(LENGTHS, (True, False)):
        arguments = {
            "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset,
            "q_offset": torch.tensor(q_offset) if tensor_offset else q_offset, "mask_function": function,
            "local_size": local_size, "allow_is_causal_skip": skip,
            "attention_mask": padding(kind, q_offset + q_length),
        }  # fmt: skip
        seen, wanted, mask = both(True, **arguments)
        assert torch.equal(seen, wanted), (name, kind, arguments, type(mask))


@pytest.mark.parametrize("kind", PADDINGS)
@pytest.mark.parametrize("window", [None, 1, 4, 8, 99])
def test_masks_of_encoders_are_transformers_own(window, kind):
    function = mu.bidirectional_mask_function
    if window is not None:
        function = mu.sliding_window_bidirectional_mask_function(window)
    for (q_length, kv_length), skip in itertools.product([(9, 9), (4, 9), (1, 9)], (True, False)):
        if window is not None and q_length != kv_length:
            continue
        arguments = {
            "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "mask_function": function,
            "local_size": window, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": skip,
            "attention_mask": padding(kind, kv_length),
        }  # fmt: skip
        seen, wanted, _ = both(False, **arguments)
        assert torch.equal(seen, wanted), (window, kind, arguments)


def test_nothing_long_is_written_out():
    """A million tokens: a written mask would take a tebibyte."""
    million = 2**20
    window = {"mask_function": mu.sliding_window_causal_mask_function(4096), "local_size": 4096}
    assert sage_mask(1, million, million) is None
    empty = sage_mask(1, million, 2 * million)  # of a static cache
    assert (empty.offset, empty.left, empty.right) == (0, UNLIMITED, 0)
    mask = sage_mask(1, million, million, attention_mask=torch.ones(1, million, dtype=torch.bool), **window)
    assert (mask.offset, mask.left, mask.right) == (0, 4095, 0)
    chunk = sage_mask(1, 4096, million, q_offset=million - 4096)
    assert (chunk.offset, chunk.left, chunk.right) == (million - 4096, UNLIMITED, 0)
    assert all(isinstance(x, BandMask) for x in (mask, chunk, empty))


def test_a_mask_of_its_own_is_never_left_out():
    """A function that merely looks like a window is asked for every cell."""

    def odd(batch_idx, head_idx, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx % 2 == 0)

    window, causal = mu.sliding_window_overlay(3), mu.causal_mask_function
    several = (odd, causal), (window, odd), (window, causal, causal)  # three functions are no band
    for function in (odd, *(mu.and_masks(*functions) for functions in several)):
        mask = sage_mask(1, 9, 9, mask_function=function, local_size=3)
        assert torch.equal(mask, mu.sdpa_mask(1, 9, 9, mask_function=function, allow_is_causal_skip=False))


BAND = {"offset": 3, "left": 4, "right": 0}


def band(seq_q=5, seq_kv=8):
    return BandMask((2, 1, seq_q, seq_kv), BAND["offset"], BAND["left"], BAND["right"], torch.empty(0))


def test_a_band_is_a_tensor_to_everyone_else():
    mask = band()
    written = torch.tensor([[k <= q + 3 and k >= q + 3 - 4 for k in range(8)] for q in range(5)])
    written = written.expand(2, 1, 5, 8)
    assert torch.equal(mask.plain(), written)
    for operation in (
        lambda m: m[:, :, :, :6], lambda m: ~m, lambda m: m.to(torch.float32), lambda m: torch.cat([m, m], -1),
        lambda m: m.reshape(-1), lambda m: m.all(), lambda m: m & True, copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)), lambda m: torch.where(m, 0.0, -1.0), lambda m: m.clone(),
    ):  # fmt: skip
        out = operation(mask)
        assert type(out) is torch.Tensor and torch.equal(out, operation(written.contiguous()))


def test_a_band_moves_between_devices_as_a_band():
    mask = band().to("meta")  # stands in for a second GPU
    assert isinstance(mask, BandMask) and mask.device.type == "meta" and mask.shape == (2, 1, 5, 8)
    assert {name: getattr(mask, name) for name in BAND} == BAND
    assert mask.plain().device.type == "meta"


def test_a_band_that_does_not_fit_its_call_is_written_out():
    call = Call(torch.nn.Identity(), band(), 0.0, None, True, None, None, None, None, False, {})
    attn_mask, causal, _, keys = masking(call, 5, 9)
    assert attn_mask.shape == (2, 1, 5, 8) and not causal and keys == 9


@pytest.mark.slow("compiles a call")
def test_a_band_goes_through_torch_compile():
    def reads(x, mask):
        return x + mask.offset if isinstance(mask, BandMask) else x * 0

    def uses(x, mask):
        return x.masked_fill(~mask, 0.0)

    for function in (reads, uses):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for seq_kv in (8, 9, 11):
            x = torch.randn(2, 1, 5, seq_kv)
            assert torch.equal(compiled(x, band(5, seq_kv)), function(x, band(5, seq_kv)))


TRACED = [  # q_length, kv_length, q_offset, kv_offset, padding: square ones that are causal and ones that are not
    (9, 9, 0, 0, "none"), (9, 9, 0, 0, "nothing"), (9, 9, 0, 0, "left"), (4, 4, 5, 0, "none"), (4, 4, 5, 5, "none"),
    (4, 4, 0, 5, "none"), (4, 9, 0, 0, "none"), (1, 1, 0, 0, "none"), (1, 9, 8, 0, "none"),
]  # fmt: skip


ENCODERS = ["bidirectional", "bidirectional window5"]  # square, and no cache


@pytest.mark.parametrize(
    ("lengths", "name"),
    [*itertools.product(TRACED, ["causal", "window5"])]
    + [(lengths, name) for lengths, name in itertools.product(TRACED, ENCODERS) if lengths[0:2] == (9, 9)],
)
def test_a_traced_mask_reads_no_values_and_hides_the_same(lengths, name):
    """What it holds is not known then: only a square causal mask without padding is left out."""
    q_length, kv_length, q_offset, kv_offset, kind = lengths
    two_sided = name in ENCODERS
    function, local_size = FUNCTIONS.get(name, (mu.bidirectional_mask_function, None))
    if name == "bidirectional window5":
        function, local_size = mu.sliding_window_bidirectional_mask_function(5), 5
    mask = padding(kind, max(q_offset, kv_offset) + max(q_length, kv_length))
    arguments = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": function, "local_size": local_size, "attention_mask": mask,
        "allow_is_causal_skip": not two_sided, "allow_is_bidirectional_skip": two_sided,
    }  # fmt: skip

    def traced(x):
        return x + 1, sage_mask(**arguments)

    torch._dynamo.reset()
    _, made = torch.compile(traced, backend="eager", fullgraph=True)(torch.zeros(1))
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    wanted = mu.sdpa_mask(**(arguments | skips))
    seen = seen_by_the_op(made, q_length, kv_length, is_causal=not two_sided)
    assert torch.equal(torch.broadcast_to(seen, wanted.shape), wanted)
    left_out = kind == "none" and (name == "bidirectional" or (name == "causal" and lengths[:4] == (9, 9, 0, 0)))
    assert (made is None) == (left_out or (name == "causal" and lengths[:4] == (1, 1, 0, 0)))


def test_padding_that_a_window_has_left_behind_needs_no_mask():
    window = {"mask_function": mu.sliding_window_causal_mask_function(4), "local_size": 4, "q_offset": 9}
    for hidden, band in ((5, True), (6, False)):  # row 9 sees keys from 6 on
        mask = torch.ones(2, 13, dtype=torch.bool)
        mask[0, hidden] = False
        assert isinstance(sage_mask(2, 4, 13, attention_mask=mask, **window), BandMask) == band


@pytest.mark.filterwarnings("ignore")
def test_a_recorded_mask_is_not_the_one_of_its_example():
    """torch.jit.trace: what is read while it records would be built in."""

    def written(padding):
        return sage_mask(2, 9, 9, attention_mask=padding).clone()

    recorded = torch.jit.trace(written, torch.ones(2, 9, dtype=torch.bool), check_trace=False)
    mask = padding("left", 9)
    assert torch.equal(recorded(mask), mu.sdpa_mask(2, 9, 9, attention_mask=mask, allow_is_causal_skip=False))


def test_a_traced_mask_reads_no_offset_either():
    def traced(offset):
        return sage_mask(2, 9, 9, q_offset=offset)

    torch._dynamo.reset()
    compiled = torch.compile(traced, backend="eager", fullgraph=True)
    for offset in (0, 3):
        wanted = mu.sdpa_mask(2, 9, 9, q_offset=torch.tensor(offset), allow_is_causal_skip=False)
        assert torch.equal(compiled(torch.tensor(offset)), wanted)
