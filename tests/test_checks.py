"""Bad input: a typed error before any launch, whose message holds the argument, what it got and what is expected."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels import new_head_state, sage_attention


def qkv(**changes):
    inputs = {"q": torch.randn(2, 8, 4, 16), "k": torch.randn(2, 12, 2, 16), "v": torch.randn(2, 12, 2, 16)}
    inputs.update(changes)
    return inputs


BAD_INPUTS = {
    "not_a_tensor": (qkv(q=[1.0]), TypeError, ["q", "list"]),
    "rank_3": (qkv(q=torch.randn(2, 8, 16)), ValueError, ["q", "rank 3", "rank 4"]),
    "rank_5": (qkv(k=torch.randn(1, 2, 12, 2, 16)), ValueError, ["k", "rank 5", "rank 4"]),
    "heads": (qkv(k=torch.randn(2, 12, 3, 16), v=torch.randn(2, 12, 3, 16)), ValueError, ["heads", "4", "3"]),
    "v_heads": (qkv(v=torch.randn(2, 12, 4, 16)), ValueError, ["v", "4 heads", "2"]),
    "batch": (qkv(k=torch.randn(1, 12, 2, 16)), ValueError, ["batch", "q 2", "k 1"]),
    "lengths": (qkv(v=torch.randn(2, 11, 2, 16)), ValueError, ["v", "11", "12"]),
    "mixed_dtype": (qkv(k=torch.randn(2, 12, 2, 16).half()), TypeError, ["k", "float16", "float32"]),
    "float64": (qkv(q=torch.randn(2, 8, 4, 16).double()), TypeError, ["q", "float64", "float16"]),
    "integers": (qkv(q=torch.zeros(2, 8, 4, 16, dtype=torch.int8)), TypeError, ["q", "int8"]),
    "mixed_device": (qkv(k=torch.randn(2, 12, 2, 16, device="meta")), ValueError, ["k", "meta", "cpu"]),
    "other_device": (
        {n: torch.randn(1, 4, 2, 16, device="meta") for n in "qkv"},
        NotImplementedError,
        ["meta", "cpu or cuda"],
    ),  # fmt: skip
    "head_dim_mismatch": (qkv(q=torch.randn(2, 8, 4, 32)), ValueError, ["head_dim", "32", "16"]),
    "head_dim_too_large": (
        {n: torch.randn(1, 4, 2, 160) for n in "qkv"},
        NotImplementedError,
        ["head_dim", "160", "128"],
    ),  # fmt: skip
    "value_head_dim": (qkv(v=torch.randn(2, 12, 2, 8)), NotImplementedError, ["v", "8", "16"]),
    "requires_grad": (
        qkv(v=torch.randn(2, 12, 2, 16, requires_grad=True)),
        NotImplementedError,
        ["v", "requires_grad", "no_grad"],
    ),  # fmt: skip
}
BAD_OPTIONS = {
    "unknown_keyword": ({"attn_maks": None}, TypeError, ["attn_maks"]),
    "unknown_recipe": ({"recipe": "int4"}, ValueError, ["recipe", "int4", "qk_int8_pv_bf16"]),
    "unknown_scaling": ({"scaling": "per_tensor"}, ValueError, ["scaling", "per_tensor", "per_token"]),
    "scale_nan": ({"scale": float("nan")}, ValueError, ["scale", "nan"]),
    "scale_negative": ({"scale": -1.0}, ValueError, ["scale", "-1"]),
    "scale_tensor": ({"scale": torch.tensor(1.0)}, TypeError, ["scale", "Tensor"]),
    "state_type": ({"state": {}}, TypeError, ["state", "dict"]),
    "state_too_small": ({"state": new_head_state(1, 16, "cpu")}, ValueError, ["state", "1 rows", "2 rows"]),
    "state_too_narrow": ({"state": new_head_state(2, 8, "cpu")}, ValueError, ["state", "8 channels", "16 channels"]),
    "state_device": ({"state": new_head_state(2, 16, "meta")}, ValueError, ["state.plan", "meta", "cpu"]),
    "state_dtype": (
        {"state": new_head_state(2, 16, "cpu")._replace(counts=torch.zeros(2, 8))},
        ValueError,
        ["state.counts", "float32"],
    ),  # fmt: skip
}


@pytest.fixture
def no_launch(monkeypatch):
    """Fails the test if anything reaches the op."""

    def launched(*_):
        raise AssertionError("an op ran although the input is bad")

    monkeypatch.setattr("sage_kernels.attention._run", launched)


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_raises_before_any_launch(case, no_launch):
    inputs, error, words = BAD_INPUTS[case]
    with pytest.raises(error) as caught:
        sage_attention(**inputs)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_unsupported_names_a_reason_for_what_the_op_refuses(case):
    assert sage_kernels.unsupported(*BAD_INPUTS[case][0].values(), enable_gqa=True)


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_option_raises_before_any_launch(case, no_launch):
    options, error, words = BAD_OPTIONS[case]
    with pytest.raises(error) as caught:
        sage_attention(**qkv(), **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_requires_grad_is_fine_without_grad():
    inputs = qkv(q=torch.randn(2, 8, 4, 16, requires_grad=True))
    with torch.no_grad():
        assert sage_attention(**inputs).shape == (2, 8, 4, 16)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("mask_type", {"attn_mask": torch.ones(8, 8, dtype=torch.int32), "enable_gqa": True}),
        ("mask_shape", {"attn_mask": torch.ones(3, 8), "enable_gqa": True}),
        ("mask_and_causal", {"attn_mask": torch.ones(8, 8), "is_causal": True, "enable_gqa": True}),
        ("dropout", {"dropout_p": 0.1}),
        ("heads", {}),
    ],
)
def test_unsupported_options(reason, options):
    assert sage_kernels.unsupported(*qkv().values(), **options) == reason


def test_supported_inputs_have_no_reason():
    assert sage_kernels.unsupported(*qkv().values(), enable_gqa=True) is None
