"""States that do not fit a call, and calls that keep no state: told before any launch, field by field."""

from __future__ import annotations

import pytest
import torch

import sage_processors as sp
from sage_kernels import HeadState, new_head_state, sage_attention
from sage_kernels.planning.row_maxima import MOST_CALLS
from sage_kernels.planning.state import ScaleState, Site
from sage_processors.unsupported import UnsupportedAttentionError
from tests.diffusion.test_compile import Pipe
from tests.diffusion.test_same_seed import Drawing, options
from tests.kernels.attention.test_attention import run_kernel
from tests.kernels.attention.test_checks import check_raises, no_launch, qkv
from tests.support.tiny_models import MODELS


__all__ = ["no_launch"]  # a fixture
# [B, S_q, H, D] of qkv(); row maxima of such a call
BATCH, SEQ_Q, HEADS = 2, 8, 4


def two_apart(x):
    """The same numbers and shape, every other one in memory."""
    return torch.stack([x, x], -1)[..., 0]


def rows(x):
    return torch.zeros(BATCH, HEADS, SEQ_Q)


WAYS = {
    "none": (lambda x: None, TypeError, ["NoneType", "torch.Tensor", "new_head_state"]),
    "float": (lambda x: 1.0, TypeError, ["float", "torch.Tensor"]),
    "device": (lambda x: x.to("meta"), ValueError, ["on meta", "on cpu"]),
    "dtype": (lambda x: x.double(), ValueError, ["float64"]),
    "shape": (lambda x: rows(x)[..., None], ValueError, ["expected contiguous"]),
    "strided": (lambda x: two_apart(x if x.numel() > 1 else rows(x)), ValueError, ["expected contiguous"]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", HeadState._fields)
def test_Q27_every_field_of_a_state_is_looked_at(name, way, no_launch):
    change, error, words = WAYS[way]
    state = new_head_state(2, 16, "cpu")
    bad = state._replace(**{name: change(getattr(state, name))})
    check_raises(qkv(), {"state": bad}, error, [f"state.{name}", *words])


def test_Q27_row_maxima_may_be_of_the_call_or_empty():
    state = new_head_state(2, 16, "cpu")
    for name in ("row_max", "row_max_next"):
        assert torch.isfinite(sage_attention(**qkv(), state=state._replace(**{name: rows(None)}))).all()


def test_row_maxima_to_read_and_none_yet_exclude_each_other(no_launch):
    both = new_head_state(2, 16, "cpu")._replace(row_max=rows(None), row_max_next=rows(None))
    check_raises(
        qkv(),
        {"state": both},
        ValueError,
        ["state.row_max_next", "beside those of state.row_max", "expected an empty tensor"],
    )


def test_a_site_whose_state_is_on_another_device_computes_its_own_scales():
    """As while a model moves: counted as such a call, and nothing is written to the other device."""
    drawing = Drawing()
    with torch.no_grad(), sp.apply(drawing.model, options()) as handle:
        for layer in handle._denoisers[0].layers:
            for site in layer.sage._sage_sites:
                site.state = HeadState(*(x.to("meta") for x in site.state))
        own = drawing.model(**drawing.inputs).sample
        assert all((row["calls"], row["dynamic_calls"]) == (1, 1) for row in handle.report().rows)
    with torch.no_grad(), sp.apply(drawing.model, options(scaling="dynamic")):
        assert torch.equal(drawing.model(**drawing.inputs).sample, own)


@pytest.mark.parametrize("on_unsupported", ["fallback", "raise"])
def test_a_negative_softmax_scale_stays_exact(on_unsupported, monkeypatch):
    """The op refuses it; here it is a reason, which is counted or raised."""
    from sage_processors.diffusion.calls import processors

    drawing, reason_against = Drawing(), processors._reason_against

    def negative(processor, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        return reason_against(processor, query, key, value, attn_mask, dropout_p, is_causal, -0.5, enable_gqa)

    monkeypatch.setattr(processors, "_reason_against", negative)
    with torch.no_grad():
        stock = drawing.model(**drawing.inputs).sample
        with sp.apply(drawing.model, options(on_unsupported=on_unsupported)) as handle:
            if on_unsupported == "raise":
                with pytest.raises(UnsupportedAttentionError, match="softmax_scale"):
                    drawing.model(**drawing.inputs)
                return
            assert torch.equal(drawing.model(**drawing.inputs).sample, stock)
            assert handle.report().fallbacks == {"softmax_scale": 2} and not handle.report().calls


@pytest.mark.parametrize("by_kernel", [False, True])
def test_outside_is_counted_of_planned_heads_only(by_kernel, kernel_device):
    """A call that plans nothing is beyond nothing, however large its keys and queries are."""
    device = kernel_device if by_kernel else "cpu"
    state = ScaleState([Site("a", 2, 16)], device=device, margin=0.25)
    q, k, v = (x * size for x, size in zip(qkv().values(), (1000, 1000, 1), strict=True))

    def call():
        if by_kernel:
            run_kernel(q.half(), k.half(), v.half(), device, state=state.head_state(0))
        else:
            sage_attention(q, k, v, state=state.head_state(0))
        return state.summary()[0]["outside"], state.summary()[0]["dynamic_calls"]

    assert call() == (0.0, 1)
    state.advance(1.0, 0.9)
    outside, dynamic = call()
    assert outside > 0.0 and dynamic == 1


def test_Q26_a_model_called_outside_of_steps_keeps_few_row_maxima():
    """As in a callback, or a loop of one's own over a pipeline's model: each call seems one more of the same step."""
    model, inputs = MODELS["flux"]()
    drawing = Drawing()
    pipe = Pipe(model, drawing.pipe.scheduler)
    config = sp.SageAttnProcessor(min_tokens=0, recipe="qk_int8_pv_fp8")
    with torch.no_grad(), sp.apply(pipe, config) as handle:
        kept = handle._denoisers[0].state.kept.row_maxima
        pipe.scheduler.set_timesteps(8)
        for t in pipe.scheduler.timesteps[:4]:
            inputs["timestep"] = t.expand(1) / 1000
            model(**inputs)
            pipe.scheduler.step(inputs["hidden_states"], t, inputs["hidden_states"])
        inputs["timestep"] = pipe.scheduler.timesteps[4].expand(1) / 1000
        for _ in range(2 * MOST_CALLS):
            model(**inputs)
        assert len(kept._kept) == 2 * MOST_CALLS  # of two layers
        nbytes = kept.nbytes
        for _ in range(MOST_CALLS):
            model(**inputs)
        assert (len(kept._kept), kept.nbytes) == (2 * MOST_CALLS, nbytes)
        assert handle.report().calls == 2 * (4 + 3 * MOST_CALLS)


def test_a_run_begins_without_row_maxima():
    """Those of the last step of a run are far from the first of the next, and would change its bits."""
    state = ScaleState([Site("a", 2, 16)], device="cpu")
    state.begin_run(1.0)
    for _ in range(5):
        state.kept.row_maxima.of(0, (1, 2, 8), torch.device("cpu"))
        state.advance(1.0, 0.9)
    assert state.kept.row_maxima.nbytes > 0
    state.begin_run(1.0)
    assert state.kept.row_maxima.nbytes == 0 and state.kept.row_maxima.of(0, (1, 2, 8), torch.device("cpu")) is None
