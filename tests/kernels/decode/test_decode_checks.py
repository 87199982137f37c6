"""Bad input of the INT8 cache's ops: an error that says which argument, what it got and what is expected."""

from __future__ import annotations

import pytest
import torch

from sage_kernels import append_kv, sage_decode_attention
from tests.kernels.decode.decode_cases import arguments


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [0.0]}, TypeError, "q: got list"),
        ({"q": torch.zeros(2, 1, 4, 64, dtype=torch.int8)}, TypeError, "q: got torch.int8"),
        ({"q": torch.zeros(2, 4, 64)}, ValueError, "q: got rank"),
        ({"q": torch.zeros(3, 1, 4, 64)}, ValueError, "q: got batch 3"),
        ({"q": torch.zeros(2, 1, 3, 64)}, ValueError, "q: got 3 heads"),
        ({"q": torch.zeros(2, 1, 4, 32)}, ValueError, "q: got head_dim 32"),
        ({"q": torch.zeros(2, 1, 4, 64, device="meta")}, ValueError, "q: got device"),
        ({"q": torch.zeros(2, 1, 4, 64, requires_grad=True)}, NotImplementedError, "no backward"),
        ({"k_codes": torch.zeros(2, 2, 25, 64)}, TypeError, "k_codes"),
        ({"k_scale": torch.ones(2, 2, 25, dtype=torch.float16)}, TypeError, "k_scale"),
        ({"v_codes": torch.zeros(2, 2, 24, 64, dtype=torch.int8)}, ValueError, "v_codes"),
        ({"k_mean": 1.0}, TypeError, "k_mean: got float"),
        ({"lengths": 20}, TypeError, "lengths"),
        ({"lengths": torch.tensor([20.0, 20.0])}, ValueError, "lengths"),
        ({"lengths": torch.tensor([20, 20, 20])}, ValueError, "lengths"),
        ({"attn_mask": torch.ones(2, 1, 1, 20, dtype=torch.bool)}, ValueError, "attn_mask: got shape"),
        ({"attn_mask": torch.ones(2, 1, 1, 26, dtype=torch.bool)}, ValueError, "attn_mask: got shape"),
        ({"attn_mask": torch.ones(2, 1, 2, 25, dtype=torch.bool)}, ValueError, "attn_mask: got shape"),
        ({"attn_mask": torch.ones(2, 5, 1, 25, dtype=torch.bool)}, ValueError, "attn_mask: got shape"),
        ({"attn_mask": torch.ones(3, 1, 1, 25, dtype=torch.bool)}, ValueError, "attn_mask: got shape"),
        ({"attn_mask": torch.ones(2, 1, 1, 25, dtype=torch.int64)}, TypeError, "attn_mask: got dtype"),
        ({"causal": "top_left"}, ValueError, "causal"),
        ({"window": 0}, ValueError, "window"),
        ({"window": 1.0}, TypeError, "window"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"softcap": torch.tensor(1.0)}, TypeError, "softcap"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"scale": -0.5}, ValueError, "scale: got -0.5"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, ValueError, "sinks"),
        *(
            (arguments_, error, f"{name}: got")
            for name, shape in (("sinks", (4,)), ("attn_mask", (2, 1, 1, 25)))
            for arguments_, error in (
                ({name: [0.0]}, TypeError),
                ({name: torch.zeros(shape).to_sparse()}, TypeError),
                ({name: torch.zeros(shape, device="meta")}, ValueError),
                ({name: torch.zeros(shape, requires_grad=True)}, NotImplementedError),
            )
        ),
    ],
)
def test_bad_input_raises(changes, error, message):
    with pytest.raises(error, match=message):
        sage_decode_attention(**arguments(**changes))


def a_cache(head_dim, device="cpu"):
    codes = torch.zeros(2, 2, 8, head_dim, dtype=torch.int8, device=device)
    return [codes, torch.ones(2, 2, 8, dtype=torch.bfloat16, device=device)] * 2


@pytest.mark.parametrize(
    ("head_dim", "device", "message"),
    [(257, "cpu", "head_dim: got 257, expected 1 to 256"), (64, "meta", "k_codes: got device meta, expected cpu or")],
)
def test_a_cache_that_no_kernel_reads_is_refused(head_dim, device, message):
    with pytest.raises(NotImplementedError, match=message):
        sage_decode_attention(torch.zeros(2, 1, 4, head_dim, device=device), *a_cache(head_dim, device))
    token = torch.zeros(2, 2, 1, head_dim, device=device)
    with pytest.raises(NotImplementedError, match=message):
        append_kv(token, token, None, *a_cache(head_dim, device), position=0)


@pytest.mark.parametrize(
    ("position", "error"),
    [
        ("2", TypeError),
        (2.0, TypeError),
        (True, TypeError),
        (-1, ValueError),
        (7, ValueError),
        (torch.tensor(2.0), ValueError),
        (torch.tensor([2]), ValueError),
        (torch.tensor(2, device="meta"), ValueError),
        (2, None),
        (6, None),
        (torch.tensor(2), None),
        (torch.tensor(2, dtype=torch.int32), None),
    ],
    ids=str,
)
def test_a_position_is_an_integer_inside_of_the_cache(position, error):
    cache, tokens = [x.clone() for x in a_cache(64)], torch.randn(2, 2, 2, 64)
    if error is None:
        append_kv(tokens, tokens, None, *cache, position=position)
        assert [bool(x.any()) for x in cache[0].unbind(2)] == [
            int(position) <= i < int(position) + 2 for i in range(8)
        ]
        return
    with pytest.raises(error, match="position: got"):
        append_kv(tokens, tokens, None, *cache, position=position)
    assert not cache[0].any()


def test_unknown_keyword_raises():
    with pytest.raises(TypeError):
        sage_decode_attention(**arguments(dropout=0.1))
