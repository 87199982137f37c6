"""Where INT8 attention stays exact and says so, where it is an error, and diffusers' own names: cases X63 to X89."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention, AttnProcessor2_0

import sage_processors as sp
from tests.diffusion.calls.test_backend import NAME
from tests.diffusion.calls.test_processors import forward
from tests.support.combinations import shows  # noqa: F401 (pytest finds fixtures here)
from tests.support.placing import device, placed
from tests.support.tiny_models import MODELS


EVERYTHING = sp.SageAttnProcessor(min_tokens=1)
STRICT = sp.SageAttnProcessor(min_tokens=1, on_unsupported="raise")


class Dispatching:
    """A processor that hands diffusers' dispatcher whatever `options` says."""

    def __init__(self, backend=None, **options):
        self._attention_backend, self.options = backend, options

    def __call__(self, attn, x, encoder_hidden_states=None, attention_mask=None):
        q, k, v = (layer(x).unflatten(-1, (attn.heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        return dispatch_attention_fn(q, k, v, backend=self._attention_backend, **self.options).flatten(2)


class Block(torch.nn.Module):
    """A model of one attention layer. forward(x [B, S, 32])."""

    def __init__(self, processor, heads=2, head_dim=16):
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attention(32, heads=heads, dim_head=head_dim, processor=processor)
        self.eval()

    def forward(self, hidden_states, timestep=None):
        return self.attn(hidden_states)


def asked(model, shows, tokens=24, config=EVERYTHING, **expected):  # noqa: F811
    model, x = placed((model, torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(1))))
    stock = forward(model, {"hidden_states": x})
    with sp.apply(model, config) as handle:
        out = forward(model, {"hidden_states": x})
        shows(handle.report(), out, stock, **expected)


def test_X63_attention_kwargs_of_a_back_end(shows):  # noqa: F811
    """They mean what the back end makes of them: `native` takes none, so a stand-in of one that does is put there."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    functions, names = _AttentionBackendRegistry._backends, _AttentionBackendRegistry._supported_arg_names
    native, known = functions[AttentionBackendName.NATIVE], names[AttentionBackendName.NATIVE]

    def windowed(query, key, value, window=0, **options):
        return native(query[:, window:], key, value, **options) if window else native(query, key, value, **options)

    functions[AttentionBackendName.NATIVE] = windowed
    names[AttentionBackendName.NATIVE] = {*known, "window"}
    try:
        asked(Block(Dispatching(attention_kwargs={"window": 3})), shows, exact={"attention_kwargs"})
    finally:
        functions[AttentionBackendName.NATIVE], names[AttentionBackendName.NATIVE] = native, known


def test_X64_block_masks_of_flex_attention(shows):  # noqa: F811
    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 128, 128, device=device())
    asked(Block(Dispatching(attn_mask=mask, backend="flex")), shows, tokens=128, exact={"block_mask"})


def test_X65_heads_of_more_than_256_channels(shows):  # noqa: F811
    asked(Block(AttnProcessor2_0(), heads=1, head_dim=264), shows, exact={"head_dim"})


def test_X66_dropout(shows):  # noqa: F811
    asked(Block(Dispatching(dropout_p=0.5)), shows, exact={"dropout"})


def test_X67_calls_too_short_to_gain(shows):  # noqa: F811
    asked(Block(AttnProcessor2_0()), shows, config=sp.SageAttnProcessor(min_tokens=25), exact={"short"})


def test_X68_layers_and_steps_that_are_kept(shows):  # noqa: F811
    asked(
        Block(AttnProcessor2_0()),
        shows,
        config=sp.SageAttnProcessor(min_tokens=1, layers={"*": {"recipe": "16bit"}}),
        exact={"kept"},
    )


def test_X69_linear_attention(shows):  # noqa: F811
    model, inputs = MODELS["sana"]()
    stock = forward(model, inputs)
    with sp.apply(model, sp.SageAttnProcessor(min_tokens=1, layers={"*.attn2": {"recipe": "16bit"}})) as handle:
        out = forward(model, inputs)
        report = handle.report()
        assert all((row["status"] == "not swappable") == ("attn1" in row["layer"]) for row in report.rows)
        shows(report, out, stock, exact={"kept"})


def test_X70_a_back_end_that_is_set_after_the_swap(shows):  # noqa: F811
    model, inputs = MODELS["flux"]()
    stock = forward(model, inputs)
    with sp.apply(model, EVERYTHING) as handle:
        model.set_attention_backend("native")
        out = forward(model, inputs)
        shows(handle.report(), out, stock, exact={"backend"})


@pytest.fixture
def registered():
    sp.register_diffusers_backend(min_tokens=0)
    yield
    sp.unregister_diffusers_backend()


def test_X71_set_attention_backend_of_models_that_ask_for_one(registered, shows):  # noqa: F811
    model, inputs = MODELS["qwen_image_padded"]()
    stock = forward(model, inputs)
    model.set_attention_backend(NAME)
    out = forward(model, inputs)
    shows(sp.diffusers_backend_report(model), out, stock)


def test_X72_set_attention_backend_of_models_that_ask_for_none(registered, shows):  # noqa: F811
    model, inputs = MODELS["unet_sd15"]()
    stock = forward(model, inputs)
    model.set_attention_backend(NAME)
    out = forward(model, inputs)
    shows(sp.diffusers_backend_report(model), out, stock, noted="ask for no back end")


# --- errors ---


def test_X80_what_int8_cannot_do_under_strict(shows):  # noqa: F811
    model = placed(Block(Dispatching(dropout_p=0.5)))
    with sp.apply(model, STRICT), shows.error(sp.UnsupportedAttentionError, "attn.*dropout"):
        forward(model, {"hidden_states": placed(torch.randn(1, 24, 32))})


def test_X81_a_model_without_an_attention_processor(shows):  # noqa: F811
    with shows.error(ValueError, "got no attention processor"):
        sp.apply(torch.nn.Sequential(torch.nn.Linear(2, 2)), EVERYTHING)


def test_X82_windows_of_steps_without_a_scheduler(shows):  # noqa: F811
    model, _ = MODELS["flux"]()
    with shows.error(ValueError, "keep: got Keep.first_steps=1.* for a model without a pipeline"):
        sp.apply(model, sp.SageAttnProcessor(keep=sp.Keep(first_steps=1)))
