"""Bad input: a typed error before any launch, whose message holds the argument, what it got and what is expected."""

from __future__ import annotations

import pytest
import torch

import sage_kernels
from sage_kernels import append_kv, new_head_state, sage_attention, sage_decode_attention
from sage_kernels.checks import REASONS
from sage_kernels.facts.masking import Masking
from sage_kernels.reference import ref_attention


def qkv(**changes):
    inputs = {"q": torch.randn(2, 8, 4, 16), "k": torch.randn(2, 12, 2, 16), "v": torch.randn(2, 12, 2, 16)}
    inputs.update(changes)
    return inputs


BAD_SHAPES = {
    "S05_257": ({n: torch.randn(1, 4, 2, 257) for n in "qkv"}, NotImplementedError, ["head_dim", "257", "256"]),
    "S05_512": ({n: torch.randn(1, 4, 2, 512) for n in "qkv"}, NotImplementedError, ["head_dim", "512", "256"]),
    "S06_value_head_dim": (qkv(v=torch.randn(2, 12, 2, 8)), NotImplementedError, ["v", "8", "16"]),
    "S06_head_dim_mismatch": (qkv(q=torch.randn(2, 8, 4, 32)), ValueError, ["head_dim", "32", "16"]),
    "S07_lengths": (qkv(v=torch.randn(2, 11, 2, 16)), ValueError, ["v", "11", "12"]),
    "S08_batch_k": (qkv(k=torch.randn(1, 12, 2, 16)), ValueError, ["batch", "q 2", "k 1"]),
    "S08_batch_v": (qkv(v=torch.randn(3, 12, 2, 16)), ValueError, ["batch", "q 2", "v 3"]),
    "S09_heads": (qkv(k=torch.randn(2, 12, 3, 16), v=torch.randn(2, 12, 3, 16)), ValueError, ["heads", "4", "3"]),
    "S09_v_heads": (qkv(v=torch.randn(2, 12, 4, 16)), ValueError, ["v", "4 heads", "2"]),
    "S09_no_heads": (qkv(k=torch.randn(2, 12, 0, 16), v=torch.randn(2, 12, 0, 16)), ValueError, ["heads", "4", "0"]),
    "S11_rank_2": (qkv(q=torch.randn(8, 16)), ValueError, ["q", "rank 2", "rank 4"]),
    "S11_rank_3": (qkv(q=torch.randn(2, 8, 16)), ValueError, ["q", "rank 3", "rank 4"]),
    "S11_rank_5": (qkv(k=torch.randn(1, 2, 12, 2, 16)), ValueError, ["k", "rank 5", "rank 4"]),
}
BAD_TYPES = {
    "not_a_tensor": (qkv(q=[1.0]), TypeError, ["q", "list"]),
    "sparse": (qkv(v=torch.zeros(2, 12, 2, 16).to_sparse()), TypeError, ["v", "sparse", "to_dense"]),
    "D01_mixed_dtype": (qkv(k=torch.randn(2, 12, 2, 16).half()), TypeError, ["k", "float16", "float32"]),
    "D01_fp16_and_bf16": (
        {n: torch.randn(1, 4, 2, 16).to(torch.bfloat16 if n == "k" else torch.float16) for n in "qkv"},
        TypeError,
        ["k", "bfloat16", "float16"],
    ),  # fmt: skip
    "D03_float64": (qkv(q=torch.randn(2, 8, 4, 16).double()), TypeError, ["q", "float64", "float16"]),
    "D03_integers": (qkv(q=torch.zeros(2, 8, 4, 16, dtype=torch.int8)), TypeError, ["q", "int8"]),
    "D03_fp8": (qkv(q=torch.zeros(2, 8, 4, 16).to(torch.float8_e4m3fn)), TypeError, ["q", "float8_e4m3fn"]),
    "D03_all_float64": ({n: torch.randn(1, 4, 2, 16).double() for n in "qkv"}, TypeError, ["q", "float64", "cast"]),
    "D03_all_int8": ({n: torch.zeros(1, 4, 2, 16, dtype=torch.int8) for n in "qkv"}, TypeError, ["q", "int8"]),
    "D03_complex": (qkv(q=torch.zeros(2, 8, 4, 16, dtype=torch.complex64)), TypeError, ["q", "complex64"]),
}
BAD_DEVICES = {
    "mixed_device": (qkv(k=torch.randn(2, 12, 2, 16, device="meta")), ValueError, ["k", "meta", "cpu"]),
    "other_device": (
        {n: torch.randn(1, 4, 2, 16, device="meta") for n in "qkv"},
        NotImplementedError,
        ["meta", "cpu or cuda"],
    ),  # fmt: skip
}
BAD_GRADIENTS = {
    name: (
        qkv(**{name: torch.randn(2, 8 if name == "q" else 12, 4 if name == "q" else 2, 16, requires_grad=True)}),
        NotImplementedError,
        [name, "requires_grad", "no_grad"],
    )
    for name in "qkv"
}
BAD_INPUTS = BAD_SHAPES | BAD_TYPES | BAD_DEVICES | BAD_GRADIENTS
BAD_SCALES = {
    "scale_nan": ({"scale": float("nan")}, ValueError, ["scale", "nan"]),
    "scale_inf": ({"scale": float("inf")}, ValueError, ["scale", "inf"]),
    "scale_negative": ({"scale": -1.0}, ValueError, ["scale", "-1"]),
    "scale_tensor": ({"scale": torch.tensor(1.0)}, TypeError, ["scale", "Tensor"]),
}
BAD_MASKS = {
    "too_few_keys": ({"attn_mask": torch.ones(8, 11)}, ValueError, ["attn_mask", "(8, 11)", "[2, 4, 8, 12]"]),
    "too_few_rows": ({"attn_mask": torch.ones(7, 12)}, ValueError, ["attn_mask", "(7, 12)", "[2, 4, 8, 12]"]),
    "one_key_more": ({"attn_mask": torch.ones(8, 13)}, ValueError, ["attn_mask", "(8, 13)", "[2, 4, 8, 12]"]),
    "one_row_more": ({"attn_mask": torch.ones(9, 12)}, ValueError, ["attn_mask", "(9, 12)", "[2, 4, 8, 12]"]),
    "one_head_more": ({"attn_mask": torch.ones(2, 5, 8, 12)}, ValueError, ["attn_mask", "(2, 5, 8, 12)"]),
    "one_sample_more": ({"attn_mask": torch.ones(3, 1, 8, 12)}, ValueError, ["attn_mask", "(3, 1, 8, 12)"]),
    "kv_heads": ({"attn_mask": torch.ones(2, 2, 8, 12)}, ValueError, ["attn_mask", "(2, 2, 8, 12)", "[2, 4, 8, 12]"]),
    "batch_of_keys": ({"attn_mask": torch.ones(2, 12)}, ValueError, ["attn_mask", "(2, 12)", "[2, 4, 8, 12]"]),
    "rank_5": ({"attn_mask": torch.ones(1, 1, 1, 8, 12)}, ValueError, ["attn_mask", "(1, 1, 1, 8, 12)"]),
    "rank_0": ({"attn_mask": torch.tensor(True)}, ValueError, ["attn_mask", "()"]),
    "int64": ({"attn_mask": torch.ones(8, 12).long()}, TypeError, ["attn_mask", "int64", "bool"]),
    "uint8": ({"attn_mask": torch.ones(8, 12).byte()}, TypeError, ["attn_mask", "uint8", "mask.bool()"]),
    "float64": ({"attn_mask": torch.ones(8, 12).double()}, TypeError, ["attn_mask", "float64", "float32"]),
    "list": ({"attn_mask": [[True]]}, TypeError, ["attn_mask", "list"]),
    "device": ({"attn_mask": torch.ones(8, 12, device="meta")}, ValueError, ["attn_mask", "meta", "cpu"]),
    "requires_grad": (
        {"attn_mask": torch.ones(8, 12, requires_grad=True)},
        NotImplementedError,
        ["attn_mask", "requires_grad"],
    ),  # fmt: skip
}
BAD_CAUSAL = {
    "no_rule": ({"causal": True}, ValueError, ["causal", "S_q 8", "S_kv 12", "top_left", "bottom_right"]),
    "unknown": ({"causal": "upper"}, ValueError, ["causal", "upper", "top_left", "bottom_right"]),
    "window_without_rule": ({"window": 4}, ValueError, ["window", "S_q 8", "S_kv 12"]),
}
BAD_OPTIONS = {
    "window_zero": ({"window": 0, "causal": "top_left"}, ValueError, ["window", "0"]),
    "window_float": ({"window": 4.0, "causal": "top_left"}, TypeError, ["window", "float"]),
    "window_bool": ({"window": True, "causal": "top_left"}, TypeError, ["window", "bool"]),
    "softcap_negative": ({"softcap": -1.0}, ValueError, ["softcap", "-1"]),
    "softcap_nan": ({"softcap": float("nan")}, ValueError, ["softcap", "nan"]),
    "softcap_tensor": ({"softcap": torch.tensor(1.0)}, TypeError, ["softcap", "Tensor"]),
    "sinks_list": ({"sinks": [0.0] * 4}, TypeError, ["sinks", "list"]),
    "sinks_kv_heads": ({"sinks": torch.zeros(2)}, ValueError, ["sinks", "(2,)", "[4]"]),
    "sinks_integers": ({"sinks": torch.zeros(4).long()}, ValueError, ["sinks", "int64"]),
    "sinks_device": ({"sinks": torch.zeros(4, device="meta")}, ValueError, ["sinks", "meta", "cpu"]),
    "cu_seqlens": ({"cu_seqlens": torch.tensor([0, 8])}, NotImplementedError, ["cu_seqlens", "attn_mask"]),
    "unknown_recipe": ({"recipe": "int4"}, ValueError, ["recipe", "int4", "qk_int8_pv_bf16"]),
    "unknown_scaling": ({"scaling": "per_tensor"}, ValueError, ["scaling", "per_tensor", "per_token"]),
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

    def launched(*_, **__):
        raise AssertionError("an op ran although the input is bad")

    monkeypatch.setattr("sage_kernels.ops.attention._compute", launched)


def check_raises(inputs, options, error, words):
    with pytest.raises(error) as caught:
        sage_attention(**inputs, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def bad_input(case):
    inputs, error, words = case
    check_raises(inputs, {}, error, words)


def bad_option(case):
    options, error, words = case
    check_raises(qkv(), options, error, words)


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_S05_S06_S07_S08_S09_S11_bad_shapes_raise_before_any_launch(case, no_launch):
    bad_input(BAD_SHAPES[case])


@pytest.mark.parametrize("case", BAD_TYPES)
def test_D01_D03_bad_dtypes_raise_before_any_launch(case, no_launch):
    bad_input(BAD_TYPES[case])


@pytest.mark.parametrize("case", BAD_DEVICES)
def test_E01_other_devices_raise_before_any_launch(case, no_launch):
    bad_input(BAD_DEVICES[case])


def test_E01_cpu_tensors_run_the_reference():
    inputs = qkv()
    assert torch.equal(sage_attention(**inputs), ref_attention(**inputs)[0])


@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_T01_inputs_that_require_grad_raise_before_any_launch(case, no_launch):
    bad_input(BAD_GRADIENTS[case])


def test_T01_requires_grad_is_fine_without_grad():
    inputs = qkv(q=torch.randn(2, 8, 4, 16, requires_grad=True))
    with torch.no_grad():
        assert sage_attention(**inputs).shape == (2, 8, 4, 16)
    with torch.inference_mode():
        assert not sage_attention(**inputs).requires_grad


def test_T02_dropout_is_no_option_of_the_op(no_launch):
    with pytest.raises(TypeError, match="dropout_p"):
        sage_attention(**qkv(), dropout_p=0.1)
    assert sage_kernels.unsupported(*qkv().values(), dropout_p=0.1) == "dropout"


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_unsupported_names_a_reason_for_what_the_op_refuses(case):
    assert sage_kernels.unsupported(*BAD_INPUTS[case][0].values(), enable_gqa=True) in REASONS


@pytest.mark.parametrize("case", BAD_SCALES)
def test_D04_bad_softmax_scales_raise_before_any_launch(case, no_launch):
    bad_option(BAD_SCALES[case])


@pytest.mark.parametrize("case", BAD_MASKS)
def test_M07_bad_masks_raise_before_any_launch(case, no_launch):
    bad_option(BAD_MASKS[case])
    if case != "list":
        assert sage_kernels.unsupported(*qkv().values(), **BAD_MASKS[case][0], enable_gqa=True) in REASONS


@pytest.mark.parametrize("causal", [True, "top_left", "bottom_right"])
def test_M08_a_mask_and_causal_raise(causal, no_launch):
    square = qkv(q=torch.randn(2, 12, 4, 16))
    words = ["attn_mask", f"causal={causal!r}"]
    check_raises(square, {"attn_mask": torch.ones(12, 12).bool(), "causal": causal}, ValueError, words)
    assert sage_kernels.unsupported(
        *square.values(), attn_mask=torch.ones(12, 12).bool(), is_causal=True, enable_gqa=True
    )


@pytest.mark.parametrize("keyword", ["attn_maks", "is_causal", "mask", "enable_gqa", "kwargs"])
def test_M11_an_unknown_keyword_is_a_type_error(keyword, no_launch):
    check_raises(qkv(), {keyword: None}, TypeError, [keyword])


@pytest.mark.parametrize("softcap", [torch.tensor(1.0), "20", None])
def test_Q42_a_softcap_that_is_no_python_number_is_a_type_error(softcap, no_launch):
    """A tensor would be read, and the device waited for."""
    with pytest.raises(TypeError, match=f"softcap: got {type(softcap).__name__}, expected a Python number"):
        sage_attention(**qkv(), softcap=softcap)


def test_Q42_a_mask_is_only_in_the_way_of_gradients_if_it_requires_some():
    inputs, mask = qkv(), torch.zeros(2, 1, 8, 12)
    with torch.enable_grad():
        assert sage_kernels.unsupported(**inputs, attn_mask=mask, enable_gqa=True) is None
        assert sage_kernels.unsupported(**inputs, attn_mask=mask.clone().requires_grad_(), enable_gqa=True) == (
            "requires_grad"
        )
    with torch.no_grad():
        assert sage_kernels.unsupported(**inputs, attn_mask=mask.clone().requires_grad_(), enable_gqa=True) is None


@pytest.mark.parametrize(
    ("options", "by_key", "by_row"),
    [
        ({}, False, False),
        ({"left": 3, "right": 0, "offset": 4}, False, False),
        ({"mask": torch.zeros(2, 1, 1, 8)}, True, False),
        ({"mask": torch.zeros(2, 3, 1, 8)}, False, True),
        ({"mask": torch.zeros(2, 1, 5, 8)}, False, True),
        ({"softcap": 20.0}, False, True),
        ({"softcap": 0.5}, False, True),
        ({"sinks": torch.zeros(3)}, False, True),
        ({"mask": torch.zeros(2, 1, 1, 8), "sinks": torch.zeros(3)}, True, True),
    ],
)
def test_Q42_only_what_needs_it_is_masked_row_by_row(options, by_key, by_row):
    """The kernels for rows are slower, and right for everything: no output would show that one ran for nothing."""
    masking = Masking(**options)
    assert (masking.by_key, masking.by_row) == (by_key, by_row)


@pytest.mark.parametrize("case", BAD_CAUSAL)
def test_K02_causality_between_different_lengths_needs_a_rule(case, no_launch):
    bad_option(BAD_CAUSAL[case])


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_option_raises_before_any_launch(case, no_launch):
    bad_option(BAD_OPTIONS[case])


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
    assert sage_kernels.unsupported(*qkv().values(), **options) == reason and reason in REASONS


@pytest.mark.parametrize(
    ("q", "kv"), [((0, 8, 4), (0, 12, 2)), ((2, 0, 4), (2, 12, 2)), ((2, 8, 0), (2, 12, 2)), ((2, 8, 4), (2, 0, 2))]
)
def test_tensors_without_elements_are_a_reason_of_their_own(q, kv):
    tensors = torch.zeros(*q, 16), torch.zeros(*kv, 16), torch.zeros(*kv, 16)
    assert sage_kernels.unsupported(*tensors, enable_gqa=True) == "empty" and "empty" in REASONS


def test_supported_inputs_have_no_reason():
    assert sage_kernels.unsupported(*qkv().values(), enable_gqa=True) is None


BEYOND = 10**400  # a Python int that is no float, and no int64


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("scale", BEYOND, "scale: got an int of 1329 bits, expected a finite number >= 0"),
        ("scale", -BEYOND, "scale: got an int of 1329 bits"),
        ("scale", float("inf"), "scale: got inf"),
        ("scale", float("nan"), "scale: got nan"),
        ("softcap", BEYOND, r"softcap: got an int of 1329 bits, expected a finite number >= 0 \(0: off\)"),
        ("window", BEYOND, "window: got an int of 1329 bits, expected at most an int64; None is no window"),
        ("window", 2**63, "window: got 9223372036854775808, expected at most an int64"),
    ],
)
def test_Q43_python_numbers_beyond_floats_and_int64_are_refused(name, value, message):
    q = torch.randn(1, 8, 2, 16)
    codes, scales = torch.zeros(1, 2, 8, 16, dtype=torch.int8), torch.ones(1, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        sage_attention(q, q, q, causal=True, **{name: value})
    with pytest.raises(ValueError, match=message):
        sage_decode_attention(q[:, :1], codes, scales, codes, scales, causal=True, **{name: value})


def test_Q43_a_position_beyond_int64_is_refused_and_the_last_one_is_not():
    k = torch.randn(1, 2, 4, 16)
    cache = [torch.zeros(1, 2, 8, 16, dtype=torch.int8), torch.zeros(1, 2, 8, dtype=torch.bfloat16)]
    cache += [x.clone() for x in cache]
    for position in (BEYOND, 2**63, 2**63 - 4):
        with pytest.raises(ValueError, match="position: got .*expected an int64 even after the new tokens"):
            append_kv(k, k, None, *cache, position=position, ring=True)
    assert not any(x.any() for x in cache)
    append_kv(k, k, None, *cache, position=2**63 - 5, ring=True)
    assert all(x.any() for x in cache)


def test_Q43_the_widest_window_is_none():
    q = torch.randn(1, 8, 2, 16)
    for causal in (True, False):
        widest = sage_attention(q, q, q, causal=causal, window=2**63 - 1)
        assert torch.equal(widest, sage_attention(q, q, q, causal=causal))
