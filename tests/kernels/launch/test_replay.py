"""Calls made once more: the same launches with other addresses, and none where something else was computed."""

from __future__ import annotations

import threading

import pytest
import torch

from sage_kernels import RECIPES, append_kv, sage_attention, sage_decode_attention
from sage_kernels.facts.state import new_head_state
from sage_kernels.ops import decode, replay


pytest.importorskip("triton", reason="triton is not installed")
from tests.support.recording_driver import run  # noqa: E402


# in a process of its own, with a driver that records what it is handed
SCRIPT = """
import torch, triton
from tests.support.recording_driver import install, record, replayed

handed = install(device=None, stream=7)
from sage_kernels._triton import launch as launching
from sage_kernels._triton.attention import launch as launch_attention
from sage_kernels._triton.prologue import prologue
from sage_kernels._triton.attention.tiles import Tile, choose_tile
from sage_kernels.facts.masking import make_masking
from sage_kernels.facts.recipe import RECIPES
from sage_kernels.facts.skipping import SkipState, empty_lists
from sage_kernels.facts.state import new_head_state

launch_attention.device_tile = lambda _, width, scaling, masking, pv, lagged: choose_tile(90, width, scaling, pv=pv)
launch_attention.processors_of = prologue.processors_of = lambda device: 132

def lists(seq_q, seq_kv):
    now, limit = torch.zeros((), dtype=torch.int32), torch.zeros(())
    totals = torch.zeros(8, dtype=torch.int64)
    return empty_lists(2, 4, seq_q, seq_kv, (192, 64), every=4, now=now, limit=limit, totals=totals)

def tensors(seq_q, seq_kv, head_dim, dtype, planned, known, skips):
    q, k, v = (torch.randn(2, s, 4, head_dim).to(dtype) for s in (seq_q, seq_kv, seq_kv))
    state = new_head_state(4, head_dim, "cpu") if planned else ()
    state = state if known is None else state.keeping(torch.empty(2, 4, seq_q), known)
    return (q, k, v, *state, *(lists(seq_q, seq_kv).tensors if skips else ()))

def call(given, planned, **options):
    masking, _ = make_masking(None, options.pop("causal", ""), None, 0.0, None, given[0].shape[1], given[1].shape[1])
    state = type(new_head_state(1, 8, "cpu"))(*given[3:10]) if planned else None
    if len(given) > 10:
        options["skip"] = SkipState(*given[10:], 4, 192, 64)
    options = {"scale": 0.1, "smooth_k": True, "return_lse": False, "masking": masking, **options}
    out, lse = launch_attention.launch_attention_fwd(*given[:3], state=state, **options)
    return out if lse is None else (out, lse)

KINDS = {
    "cut along the keys": dict(planned=True, scaling="planned", return_lse=True, seq_kv=2048),
    "fp8, planned": dict(planned=True, scaling="planned", recipe="qk_int8_pv_fp8"),
    "fp8, maxima kept": dict(planned=True, known=False, scaling="planned", recipe="qk_int8_pv_fp8"),
    "fp8, maxima known": dict(planned=True, known=True, scaling="planned", recipe="qk_int8_pv_fp8"),
    "lists of key tiles": dict(planned=True, scaling="planned", skips=True),
    "lists, fp8, maxima known": dict(
        planned=True, known=True, scaling="planned", skips=True, recipe="qk_int8_pv_fp8"
    ),
    "per_token, rotated, lse, two lengths": dict(
        scaling="per_token", rotation="hadamard", return_lse=True, seq_q=70, seq_kv=300
    ),
}
for name, kind in KINDS.items():
    kind = dict(kind)
    planned, dtype = kind.pop("planned", False), torch.bfloat16
    shape = kind.pop("seq_q", 200), kind.pop("seq_kv", 200), 64, dtype, planned
    shape += kind.pop("known", None), kind.pop("skips", False)
    _, lines = replayed(handed, name, lambda *given: call(given, planned, **kind), tensors(*shape), tensors(*shape))
    assert len(lines) > 1, name

# calls that compute something beside their launches, or hand the same tensor over twice
import triton.language as tl

@triton.jit
def copy(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))

def copied(x, y, through=lambda x: x, result=lambda x: x):
    out = launching.buffer(64, device="cpu", returned=True)
    launching.launch(copy, 1, through(x), y, out, BLOCK=64)
    return result(out)

x, y = torch.randn(65), torch.randn(64)
first, shifted = x[:64], x[1:]
assert record(lambda: copied(first, y), (first, y))[1] is not None
for name, call, given in (
    ("computed between", lambda: copied(first, y, through=torch.clone), (first, y)),
    ("computed after", lambda: copied(first, y, result=torch.clone), (first, y)),
    ("a tensor that is not given", lambda: copied(first, y), (first,)),
    ("the same twice", lambda: copied(y, y), (y, y)),
    ("an address that is compiled for alone", lambda: copied(shifted, y), (shifted, y)),
    ("no launch", lambda: launching.buffer(64, device="cpu", returned=True), (first, y)),
):
    results, again = record(call, given)
    assert again is None and torch.is_tensor(results), name
print("all made again alike")
"""


@pytest.mark.slow("compiles every kernel")
def test_a_replayed_call_launches_what_a_new_one_would(tmp_path):
    done = run(SCRIPT, tmp_path)
    assert done.stdout == "all made again alike\n", done.stderr[-3000:]


DECODE_SCRIPT = """
import torch
from tests.support.recording_driver import install, named, record

handed = install(device=None, stream=7)
from sage_kernels.ops import decode
from sage_kernels._triton.decode import append_kv, launch as attention_decode

attention_decode.capability_of = lambda device: 90
attention_decode.programs_at_once = lambda device, tile: 528

def cache(room, tokens):
    codes = [torch.zeros(2, 2, room, 64, dtype=torch.int8)[:, :, :tokens] for _ in "kv"]
    scales = [torch.ones(2, 2, room, dtype=torch.bfloat16)[:, :, :tokens] for _ in "kv"]
    return codes[0], scales[0], codes[1], scales[1]

KINDS = {
    "plain": {},
    "few keys, one part": dict(room=100, tokens=(70, 71)),
    "window, lse": dict(window=900, causal=True, return_lse=True),
    "lengths, ring, sinks": dict(lengths=torch.tensor([3, 4]), ring=True, sinks=torch.zeros(8)),
    "no mean": dict(mean=None),
    "balance": dict(balance=torch.ones(2, 2, 64)),
}
for name in CHOSEN:
    kind = KINDS[name]
    usual = {"window": None, "causal": False, "return_lse": False, "lengths": None, "ring": False, "sinks": None}
    usual |= {"room": 5100, "tokens": (5000, 5001), "mean": torch.zeros(2, 2, 64), "balance": None}
    kind = usual | kind
    room, mean = kind["room"], kind["mean"]
    keys = []
    for tokens in kind["tokens"]:
        q = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16)
        whole = (*cache(room, tokens), mean)
        options = tuple(kind[x] for x in ("ring", "causal", "window")) + (0.0, None, kind["return_lse"])
        key, given, numbers = decode._attend_key(q, (*whole, kind["balance"]), kind["lengths"], kind["sinks"], options)
        keys.append(key)
        from sage_kernels.facts.masking import Masking
        from sage_kernels.facts.masking import decode_band

        def call():
            masking = Masking(None, *decode_band(kind["causal"], kind["window"]), softcap=0.0, sinks=kind["sinks"])
            out, lse = attention_decode.launch_decode_attention(
                q, *whole, kind["lengths"], ring=kind["ring"], masking=masking, scale=0.1,
                return_lse=kind["return_lse"], k_balance=kind["balance"],
            )
            return out if lse is None else (out, lse)

        if len(keys) == 1:
            results, again = record(call, given, numbers)
            assert again is not None, name
            named(handed, given, results)
    made = again(given, numbers)
    replayed = named(handed, given, made)
    fresh = call()
    assert replayed == named(handed, given, fresh) and len(replayed) == (1 if room == 100 else 2), (name, replayed)
    assert keys[0] == keys[1], name  # a token more is made again
    # what is not handed over as the number that the recorded call names
    assert record(call, given, {"capacity": 1})[1] is None
    handed.clear()

k, v = (torch.randn(2, 2, 1, 64) for _ in "kv")
tensors = (k, v, torch.zeros(2, 2, 64), *cache(100, 100))
for balance in (None, torch.ones(2, 2, 64)):
    keys = []
    for start in (7, 8):
        key, given, numbers = decode._append_key((*tensors, balance), start, False)
        keys.append(key)
        call = lambda: append_kv.launch_append_kv(
            *tensors, position=None, start=start, ring=False, k_balance=balance
        )
        if start == 7:
            results, again = record(call, given, numbers)
            assert results is None and again is not None
            named(handed, given, ())
    made = again(given, numbers)
    assert made == ()
    replayed = named(handed, given, ())
    call()
    assert replayed == named(handed, given, ()) and len(replayed) == 1 and keys[0] == keys[1]
    handed.clear()
assert decode._append_key(tensors, 100, False)[0] is None and decode._append_key(tensors, 100, True)[0] is not None
print("all made again alike")
"""


@pytest.mark.parametrize(
    "kinds",
    [
        ("plain", "few keys, one part", "lengths, ring, sinks"),
        pytest.param(
            ("window, lse", "no mean", "balance"), marks=pytest.mark.slow("compiles the kernels of more kinds")
        ),
    ],
)
def test_a_replayed_decoding_step_launches_what_a_new_one_would(kinds, tmp_path):
    done = run(f"CHOSEN = {kinds}\n{DECODE_SCRIPT}", tmp_path)
    assert done.stdout == "all made again alike\n", done.stderr[-3000:]


def test_the_key_of_a_decoding_step_holds_all_that_decides_it():
    usual = (False, True, None, 0.0, None, False)  # ring, causal, window, softcap, scale, return_lse

    def key(q=(1, 1, 8, 64), heads=2, tokens=900, scales=None, options=usual, **changed):
        # views of buffers with room for more: their strides don't tell how many tokens there are
        codes = [torch.zeros(1, heads, 10_000, 64, dtype=torch.int8)[:, :, :tokens] for _ in "kv"]
        scales = [torch.ones(1, heads, 10_000, dtype=torch.bfloat16)[:, :, : scales or tokens] for _ in "kv"]
        tensors = {"k_codes": codes[0], "k_scale": scales[0], "v_codes": codes[1], "v_scale": scales[1]}
        tensors |= {"k_mean": torch.zeros(1, 2, 64), "lengths": None, "sinks": None, "q": torch.zeros(q)} | changed
        tensors.setdefault("k_balance", None)
        names = ("k_codes", "k_scale", "v_codes", "v_scale", "k_mean", "k_balance")
        held = tuple(tensors[name] for name in names)
        return decode._attend_key(tensors["q"], held, tensors["lengths"], tensors["sinks"], options)[0]

    base = key()
    assert base is not None and base == key(tokens=901)
    others = [
        key(q=(1, 2, 8, 64)), key(q=(1, 1, 4, 64)), key(heads=1), key(tokens=150),
        key(scales=899), key(k_mean=None), key(k_mean=torch.zeros(1, 2, 32)),
        key(k_balance=torch.ones(1, 2, 64)), key(k_mean=None, k_balance=torch.ones(1, 2, 64)),
        key(lengths=torch.tensor(3)),
        key(lengths=torch.tensor([3])), key(lengths=torch.tensor(3.0)), key(sinks=torch.zeros(8)),
        key(k_scale=torch.ones(1, 2, 10_000)[:, :, :900]),
        key(v_codes=torch.zeros(1, 2, 10_000, 64, dtype=torch.int8)[:, :1, :900]),
        key(v_codes=torch.zeros(1, 2, 64, 900, dtype=torch.int8).mT),
        *(key(options=(*usual[:i], x, *usual[i + 1 :])) for i, x in (
            (0, True), (0, 0), (1, False), (2, 64), (3, 5.0), (3, 0), (4, 0.5), (5, True),
        )),
    ]  # fmt: skip
    assert len({base, *others}) == len(others) + 1 and None not in others
    refused = [key(options=(False, True, "64", 0.0, None, False)), key(tokens=0), key(k_codes=None)]
    assert refused == [None] * 3


def test_calls_are_told_apart_by_options_and_all_tensors():
    replay.forget()
    x, y = torch.zeros(2, 3), torch.zeros(4)
    tensors = [(x, x), (x, x, y), (x, x, y.half()), (x.half(), x), (x, x, y[:2]), (torch.zeros(3, 2).T, x), (x.T, x)]
    calls = [(options, given) for options in ((1, int), (1.0, float)) for given in tensors]
    try:
        for number, (options, given) in enumerate(calls):
            key, results = replay.replay_by_key((options, *replay.layouts_of(given)), given)
            assert results is None
            replay.replays[key] = lambda *_, number=number: number
        for _ in range(3):
            for number, (options, given) in enumerate(calls):
                key = (options, *replay.layouts_of(given))
                assert replay.replay_by_key(key, given) == (key, number)
        key = ((1, int), *replay.layouts_of((x, y)))
        assert replay.replay_by_key(key, (x, y)) == (key, None)
        assert replay.replay_by_key(([], list), (x, x)) == (None, None)
    finally:
        replay.forget()


def inputs(seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (2, 384, 4, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for _ in range(3)]


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "return_lse": True}, {"rotation": "hadamard"}, {"softcap": 5.0}]
)
@pytest.mark.parametrize(
    ("recipe", "planned"), [(r.name, p) for r in RECIPES.values() for p in (False, True) if not (p and r.plain)]
)
def test_replayed_calls_give_the_same_bits(options, recipe, planned, monkeypatch):
    replay.forget()
    from sage_kernels._triton.launch.replay import Replay

    states = [new_head_state(4, 64, "cuda") if planned else None for _ in range(5)]
    new = []
    for seed in (0, 1):
        replay.forget()
        new.append(sage_attention(*inputs(seed), recipe=recipe, state=states[seed], **options))
    assert len(replay.replays) == 1
    again, calls = Replay.__call__, []
    monkeypatch.setattr(Replay, "__call__", lambda *arguments: calls.append(1) or again(*arguments))
    for seed in (0, 1, 0):  # found by its key, by what was found before, and once more
        poison = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(3)]  # what buffers then hold
        del poison
        old = sage_attention(*inputs(seed), recipe=recipe, state=states[2 + len(calls)], **options)
        for a, b in zip(as_tuple(old), as_tuple(new[seed]), strict=True):
            assert torch.equal(a, b)
        if planned:
            for name, a, b in zip(states[0]._fields, states[seed], states[1 + len(calls)], strict=True):
                assert torch.equal(a, b), name
    assert len(calls) == 3


@pytest.mark.gpu
def test_a_known_call_still_meets_its_checks():
    replay.forget()
    q, k, v = inputs(0)
    state = new_head_state(4, 64, "cuda")
    out = sage_attention(q, k, v, state=state)
    sage_attention(q, k, v, state=state)
    assert len(replay.replays) == 1
    with pytest.raises(NotImplementedError):
        sage_attention(q.requires_grad_(), k, v, state=state)
    q.requires_grad_(False)
    with pytest.raises(ValueError):
        sage_attention(q, k, v, state=state._replace(plan_scale=torch.zeros(3, device="cuda")))
    with pytest.raises(TypeError):
        sage_attention(q, k, v, window=True)
    with pytest.raises(ValueError):
        sage_attention(q, k, v, causal="")
    # an address off by two bytes goes its own way
    shifted = torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert torch.equal(sage_attention(shifted, k, v, state=new_head_state(4, 64, "cuda")), out)


@pytest.mark.gpu
def test_a_replayed_call_is_captured_and_runs_on_the_current_stream():
    replay.forget()
    q, k, v = inputs(0)
    other = inputs(1)
    wanted = sage_attention(*other)
    sage_attention(q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(other[0]), k.copy_(other[1]), v.copy_(other[2])
        out = sage_attention(q, k, v)  # on another stream it would read what q, k and v held before
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
    q, k, v = inputs(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sage_attention(q, k, v)
    q.copy_(other[0]), k.copy_(other[1]), v.copy_(other[2])
    graph.replay()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_a_growing_cache_is_decoded_again_with_the_same_bits():
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    room, steps = 700, 6
    codes = [torch.zeros(2, 2, room, 64, dtype=torch.int8, device="cuda") for _ in range(4)]
    scales = [torch.zeros(2, 2, room, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    mean = torch.zeros(2, 2, 64, device="cuda")
    new = [(draw(2, 2, 1, 64), draw(2, 2, 1, 64), draw(2, 1, 8, 64)) for _ in range(steps)]
    first = draw(2, 2, 600, 64), draw(2, 2, 600, 64)

    def decode_all(buffers, forget):
        outs = []
        append_kv(*first, mean, *buffers, position=0)
        for step, (k, v, q) in enumerate(new):
            if forget:
                replay.forget()
            append_kv(k, v, mean, *buffers, position=600 + step)
            held = [x[:, :, : 601 + step] for x in buffers]
            outs.append(sage_decode_attention(q, *held, mean, causal=True, return_lse=True))
        return outs

    one, two = ((codes[i], scales[i], codes[i + 1], scales[i + 1]) for i in (0, 2))
    fresh = decode_all(one, forget=True)
    replay.forget()
    again = decode_all(two, forget=False)
    kinds = sorted(key[0] for key in replay.replays)
    assert kinds == ["append", "append", "decode"]  # the prompt, one token, and all steps of attention
    assert all(torch.equal(a, b) for pair in zip(fresh, again, strict=True) for a, b in zip(*pair, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    with pytest.raises(ValueError):
        append_kv(*new[0][:2], mean, *two, position=room)
    with pytest.raises(ValueError):
        sage_decode_attention(new[0][2][:1], *two, mean, causal=True)


def test_results_are_made_like_a_tensor_of_their_kind_only():
    from sage_kernels._triton.launch.replay import _like

    result = torch.empty(2, 3, 4, 8)
    other, turned = torch.empty(2, 3, 4, 8, dtype=torch.float16), torch.empty(2, 4, 3, 8).transpose(1, 2)
    assert turned.shape == result.shape
    assert _like(result, [other, turned]) is None and _like(result, [other, turned, torch.empty(2, 3, 4, 8)]) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["qk_int8_pv_bf16", "qk_int8_pv_fp8"])
def test_replayed_calls_give_the_same_bits_from_another_thread(recipe):
    """A thread whose context nobody has set, with buffers at other addresses."""
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (torch.randn(1, 700, 4, 64, device="cuda", generator=generator).bfloat16() for _ in range(3))
    state = new_head_state(4, 64, "cuda")
    before = set(replay.replays)
    first = sage_attention(q, k, v, state=state, recipe=recipe)
    assert len(set(replay.replays) - before) == 1
    results = [sage_attention(q, k, v, state=state, recipe=recipe)]
    in_the_way = torch.empty(3 << 20, device="cuda")  # the next buffers lie elsewhere
    thread = threading.Thread(target=lambda: results.append(sage_attention(q, k, v, state=state, recipe=recipe)))
    thread.start()
    thread.join()
    del in_the_way
    assert len(results) == 2 and all(torch.equal(first, x) for x in results)
