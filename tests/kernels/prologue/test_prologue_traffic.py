"""Traffic of the prologue and of decoding, counted: every load, store and atomic, address by address."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sage_kernels.facts.recipe import FIT_SAMPLES
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import make_qkv


BLOCK = 64  # keys of a tile in the interpreter
SEQ, HEAD_DIM, KV_HEADS = 1024, 64, 2
KEYS = 512  # of a program: in the interpreter four are to run at once, of two heads
SAMPLE = 128  # tokens that a head without a plan is sampled at


class Traffic:
    """What the interpreted kernels touched while it is installed.

    Attributes: launches: names of the kernels in order. touched: (kernel, "load" or "store", addresses, bytes each).
        keys: what the prologue of the latest call made.
    """

    def __init__(self, patch):
        from triton.runtime import interpreter

        from sage_kernels._triton.attention import launch as launch_attention

        self.launches, self.touched, self.keys = [], [], None
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        call, load, store = executor.__call__, builder.create_masked_load, builder.create_masked_store
        atomic, prepare = builder.create_atomic_rmw, launch_attention.launch_prologue

        def called(self_, *args, **kwargs):
            self.launches.append(self_.fn.__name__)
            return call(self_, *args, **kwargs)

        def note(kind, ptrs, mask):
            size = ptrs.get_element_ty().primitive_bitwidth // 8
            chosen = np.asarray(mask if isinstance(mask, np.ndarray) else mask.data, dtype=bool)
            addresses = np.broadcast_to(ptrs.data, chosen.shape)[chosen]
            self.touched.append((self.launches[-1], kind, addresses.astype(np.int64).ravel(), size))

        def loaded(self_, ptrs, mask, *rest, **more):
            note("load", ptrs, mask)
            return load(self_, ptrs, mask, *rest, **more)

        def stored(self_, ptrs, value, mask, *rest, **more):
            note("store", ptrs, mask)
            return store(self_, ptrs, value, mask, *rest, **more)

        def updated(self_, op, ptr, value, mask, *rest):
            note("load", ptr, mask)
            note("store", ptr, mask)
            return atomic(self_, op, ptr, value, mask, *rest)

        def prepared(*args, **kwargs):
            self.keys = prepare(*args, **kwargs)
            return self.keys

        patch.setattr(executor, "__call__", called)
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        patch.setattr(builder, "create_atomic_rmw", updated)
        patch.setattr(launch_attention, "launch_prologue", prepared)

    def clear(self):
        self.launches.clear()
        self.touched.clear()

    def times(self, kind: str, tensor: torch.Tensor, kernel: str = "_prologue_kernel") -> torch.Tensor:
        """How often one kernel loaded or stored each element of a contiguous tensor."""
        assert tensor.is_contiguous()
        counts = np.zeros(tensor.numel(), np.int64)
        for name, what, addresses, size in self.touched:
            offsets = addresses - tensor.data_ptr()
            inside = offsets[(offsets >= 0) & (offsets < tensor.numel() * tensor.element_size())]
            if name == kernel and what == kind and len(inside):
                assert size == tensor.element_size()
                np.add.at(counts, inside // size, 1)
        return torch.from_numpy(counts).view(tensor.shape)

    def bytes(self, kernel: str = "_prologue_kernel") -> int:
        """All that one kernel loaded and stored."""
        return sum(len(addresses) * size for name, _, addresses, size in self.touched if name == kernel)


@pytest.fixture
def traffic(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("the interpreter was not chosen: there is a GPU")
    return Traffic(monkeypatch)


def attend(traffic, q, k, v, **options):
    from sage_kernels._triton.attention.launch import launch_attention_fwd

    traffic.clear()
    options = {"scaling": "per_token", "state": None} | options
    launch_attention_fwd(q, k, v, scale=0.125, smooth_k=True, return_lse=False, **options)


def inputs(seed=0, seq=SEQ):
    return make_qkv("biased_keys", 1, 40, seq, 2 * KV_HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float16, seed=seed)


def planned_state(traffic, margin, *calls):
    state = ScaleState([Site("a", KV_HEADS, HEAD_DIM)], device="cpu", margin=margin)
    for call in calls:
        attend(traffic, *call, state=state.head_state(0))
        state.advance(0.5, 0.5)
    return state.head_state(0)


def codes(traffic, seq=SEQ):
    """Codes of the keys [B·H_kv, S, D] and how often each was stored; the padding is checked here."""
    times = traffic.times("store", traffic.keys.codes)
    assert (times[:, seq:] >= 1).all()
    return times[:, :seq]


def read_once_but_for_the_fit(traffic, tensor):
    """Whether every element was loaded once, and the tokens of the sample once more for each 512 keys."""
    times = traffic.times("load", tensor)
    programs = -(-tensor.shape[1] // KEYS)
    return set(times.unique().tolist()) == {1, 1 + programs} and (times > 1).sum() == FIT_SAMPLES * KV_HEADS * HEAD_DIM


PLANNED = ["_prologue_kernel", "_attention_fwd_kernel"]


@pytest.mark.parametrize("seq", [SEQ, 1000])
def test_a_planned_head_reads_its_keys_once_and_writes_its_codes_once(traffic, seq):
    """3 bytes per element of K in 16 bit: 2 read, 1 written. Once per 512 keys come on top: the plan, and the 32 keys
    and queries by which its fit is seen."""
    q, k, v = inputs(seq=seq)
    state = planned_state(traffic, 2.0, (q, k, v))  # a margin that nothing leaves
    attend(traffic, q, k, v, state=state)
    assert traffic.launches == PLANNED
    assert read_once_but_for_the_fit(traffic, k)
    assert (traffic.times("store", traffic.keys.codes) == 1).all()
    # three vectors in, one out, statistics in and out, for each program; a scale a tile
    programs, tiles = -(-seq // KEYS) * KV_HEADS, -(-seq // BLOCK) * KV_HEADS
    # Q is quantised inside of the attention kernel
    assert traffic.times("load", q).sum() == programs * FIT_SAMPLES * HEAD_DIM
    padded = tiles * BLOCK * HEAD_DIM
    vectors = programs * (3 + 4) * HEAD_DIM * 4 + KV_HEADS * HEAD_DIM * 4
    fit = programs * FIT_SAMPLES * HEAD_DIM * 2 * 2
    assert traffic.bytes() <= 2 * k.numel() + padded + vectors + fit + 4 * tiles + 100 * programs
    if seq == SEQ:
        assert 3.0 <= (traffic.bytes() - fit) / k.numel() <= 3.08
    # and the attention kernel reads codes, never K
    assert (traffic.times("load", k, "_attention_fwd_kernel") == 0).all()


def test_a_tile_that_outgrew_its_plan_is_read_and_written_once_as_well(traffic):
    q, k, v = inputs()
    state = planned_state(traffic, 2.0, (q, k, v))
    k[0, 300, 1, 5] *= 100
    attend(traffic, q, k, v, state=state)
    assert read_once_but_for_the_fit(traffic, k) and (codes(traffic) == 1).all()
    assert traffic.launches == PLANNED
    scale = traffic.keys.scale.view(KV_HEADS, -1)
    assert scale[1].argmax() == 300 // BLOCK and scale[1].max() > 10 * scale[1].median()


def test_a_head_without_a_plan_reads_a_sample_of_itself_as_well(traffic):
    """3 bytes per element and what the samples cost, for each 512 keys: three passes over 128, and the look at a plan
    that is none."""
    q, k, v = inputs()
    state = planned_state(traffic, 2.0)
    attend(traffic, q, k, v, state=state)
    assert traffic.launches == PLANNED
    times = traffic.times("load", k)
    programs = SEQ // KEYS
    assert times.min() == 1 and times.sum() == (SEQ + programs * (3 * SAMPLE + FIT_SAMPLES)) * KV_HEADS * HEAD_DIM
    assert (codes(traffic) == 1).all()
    assert traffic.times("load", q).sum() <= programs * (SAMPLE * q.shape[2] + FIT_SAMPLES * KV_HEADS) * HEAD_DIM


@pytest.mark.parametrize("scaling", ["per_token", "per_block"])
def test_scales_of_the_call_itself(traffic, scaling):
    """3 bytes per element and three passes over the sample; per_token 4 bytes per key and head for its scale too."""
    q, k, v = inputs()
    attend(traffic, q, k, v, scaling=scaling)
    assert traffic.launches == PLANNED
    times = traffic.times("load", k)
    tokens = SEQ + SEQ // KEYS * 3 * SAMPLE
    assert times.min() == 1 and times.sum() == tokens * KV_HEADS * HEAD_DIM
    assert (codes(traffic) == 1).all()
    assert traffic.keys.scale.numel() == KV_HEADS * (SEQ if scaling == "per_token" else SEQ // BLOCK)
    assert (traffic.times("store", traffic.keys.scale) == 1).all()


def test_the_prologue_zeroes_what_it_is_asked_to_and_nothing_beside(traffic):
    from sage_kernels._triton.attention.launch import launch_prologue
    from sage_kernels._triton.prologue.mask_tiles import launch_mask_tiles
    from sage_kernels.facts.masking import NO_MASKING

    q, k, _ = inputs(seq=100)
    mask = launch_mask_tiles(NO_MASKING, 2 * KV_HEADS, KV_HEADS, 40, 100, BLOCK, BLOCK)
    options = {"scaling": "per_token", "smooth_k": True, "state": None, "mask": mask, "return_center": False}
    options |= {"block_n": BLOCK, "width": HEAD_DIM, "rotation": "none"}
    memory = torch.full((1000,), 7, dtype=torch.int32)
    launch_prologue(q, k, None, zeroed=memory[300:600], **options)
    assert (memory[300:600] == 0).all() and (memory[:300] == 7).all() and (memory[600:] == 7).all()


FP8 = "qk_int8_pv_fp8"


def fp8_traffic(traffic, v):
    """How often V was loaded, in all launches together, and how often each of its codes was stored."""
    loaded = sum(traffic.times("load", v, kernel) for kernel in set(traffic.launches))
    codes = traffic.keys.values.view(torch.uint8)
    return loaded, traffic.times("store", codes)


@pytest.mark.parametrize("seq", [SEQ, 1000])
def test_values_of_a_planned_head_are_read_and_written_once_in_the_launch_of_its_keys(traffic, seq):
    """3 bytes per element of V in 16 bit, as of K; no launch more than in 16 bit."""
    q, k, v = inputs(seq=seq)
    state = ScaleState([Site("a", KV_HEADS, HEAD_DIM)], device="cpu", margin=2.0)
    attend(traffic, q, k, v, state=state.head_state(0), recipe=FP8)
    state.advance(0.5, 0.5)
    attend(traffic, q, k, v, state=state.head_state(0), recipe=FP8)
    assert traffic.launches == PLANNED
    loaded, stored = fp8_traffic(traffic, v)
    assert (loaded == 1).all() and (stored == 1).all()
    assert read_once_but_for_the_fit(traffic, k) and (traffic.times("store", traffic.keys.codes) == 1).all()
    v[0, 700, 1, 5] = 60000.0  # clipped: the codes of the program that finds it are written again
    attend(traffic, q, k, v, state=state.head_state(0), recipe=FP8)
    loaded, stored = fp8_traffic(traffic, v)
    half = HEAD_DIM // 2  # the channels of one program
    assert loaded[0, 700, 1].tolist() == [2] * half + [1] * half
    assert (loaded[:, :, 0] == 1).all() and int(stored.max()) == 2


def test_values_without_a_plan_are_read_before_they_are_cast(traffic):
    """Without a state by a launch of its own, twice; with one by every program of the head, as only the device knows
    whether it has a plan."""
    q, k, v = inputs()
    attend(traffic, q, k, v, recipe=FP8)
    assert traffic.launches == ["_value_amax_kernel", *PLANNED]
    loaded, stored = fp8_traffic(traffic, v)
    assert (loaded == 2).all() and (stored == 1).all()
    state = ScaleState([Site("a", KV_HEADS, HEAD_DIM)], device="cpu")
    attend(traffic, q, k, v, state=state.head_state(0), recipe=FP8)
    assert traffic.launches == PLANNED
    loaded, stored = fp8_traffic(traffic, v)
    assert (loaded == 1 + SEQ // (4 * 128)).all() and (stored == 1).all()  # four steps of 128 keys a program


def test_rotation_reads_and_writes_q_and_k_once_in_one_launch_more(traffic):
    """Without a state another one samples each head's centre and balance."""
    q, k, v = inputs()
    state = ScaleState([Site("a", KV_HEADS, HEAD_DIM)], device="cpu").head_state(0)
    for options, sampling in (({"state": state}, []), ({}, ["_pre_balance_kernel"])):
        attend(traffic, q, k, v, rotation="hadamard", **options)
        assert traffic.launches == [*sampling, "_rotate_kernel", *PLANNED]
        for x in (q, k):
            assert (traffic.times("load", x, "_rotate_kernel") == 1).all()
            assert (traffic.times("load", x) == 0).all()
        assert sampling or traffic.bytes("_rotate_kernel") == 2 * 2 * (q.numel() + k.numel())
        loaded = traffic.times("load", k, "_pre_balance_kernel")
        assert (loaded.amax((0, 2, 3)) > 0).sum() <= len(sampling) * 2 * SAMPLE


def test_decoding_reads_its_inputs_and_nothing_beside_them(traffic):
    """A cache that is full to its end, within larger memory: looking a tile ahead must not look beyond."""
    from sage_kernels._triton.decode.launch import launch_decode_attention
    from sage_kernels.facts.masking import UNLIMITED, Masking

    tokens, guard = 3 * BLOCK, 4096
    shapes = [(1, 1, 8, HEAD_DIM), *[(1, KV_HEADS, tokens, HEAD_DIM), (1, KV_HEADS, tokens)] * 2]
    dtypes = [torch.float16, torch.int8, torch.bfloat16, torch.int8, torch.bfloat16]

    def within_more(shape, dtype):
        number = torch.Size(shape).numel()
        return torch.ones(number + 2 * guard, dtype=dtype)[guard:-guard].view(shape)

    inputs = [within_more(*kind) for kind in zip(shapes, dtypes, strict=True)]
    masking = Masking(None, UNLIMITED, UNLIMITED, softcap=0.0, sinks=None)
    options = {"ring": False, "masking": masking, "scale": 0.125, "return_lse": False}
    for splits in (1, 2, 3):
        traffic.clear()
        launch_decode_attention(*inputs, None, None, splits=splits, **options)
        kernel = "_decode_attention_kernel"
        loaded = np.concatenate([a for name, kind, a, _ in traffic.touched if (name, kind) == (kernel, "load")])
        known = np.zeros(len(loaded), bool)
        for x in inputs:
            known |= (loaded >= x.data_ptr()) & (loaded < x.data_ptr() + x.numel() * x.element_size())
        assert len(loaded) and known.all(), splits
        for codes, word in ((inputs[1], 1), (inputs[3], 2)):  # each once, V as words of two
            own = loaded[(loaded >= codes.data_ptr()) & (loaded < codes.data_ptr() + codes.numel())]
            assert len(own) == len(np.unique(own)) == codes.numel() // word, splits
