"""Lists that skip key tiles at random, in one attention call or a whole model, and their reference."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional
from replaced_attention import attention_as

from sage_kernels import new_skip_state
from sage_kernels.facts.skipping import CLOCK_LAST, SkipState, pack, unpack
from sage_kernels.planning.skip_lists import SkipLists


EVERY = 8
ROWS_AT_ONCE = 2048  # query rows of the reference: with 32,760 keys in fp32, a quarter of a GB of scores


class Shape(NamedTuple):
    """Shape of the calls that have lists."""

    batch: int
    heads: int
    seq_q: int
    seq_kv: int
    head_dim: int


def random_lists(shape: Shape, share: float, recipe: str, device, compensates: bool = False) -> SkipState:
    """Return lists that leave out a share of the key tiles at random.

    The share holds for every query tile. The first key tile is always visited. The lists stay the same in all calls.
    """
    lists = new_skip_state(*shape, device, recipe=recipe, limit=0.5, every=EVERY, compensates=compensates)
    tiles = -(-shape.seq_kv // lists.block_k)
    generator = torch.Generator(device).manual_seed(0)
    order = torch.rand(*lists.lists.shape[:3], tiles - 1, generator=generator, device=device).argsort(-1)
    skipped = torch.nn.functional.pad(order < round(share * tiles), (1, 0))
    lists.lists.copy_(pack(skipped))
    lists.clock[CLOCK_LAST] = lists.now  # no step since then, so nothing is measured
    return lists


def attend_listed(q, k, v, lists: SkipState, first: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return attention of the query rows from `first` on to the keys that are not skipped, in `dtype`.

    With compensation a skipped tile is one key and value, their means, of the weight of all keys in it.

    Args: q [B, S_q, H, D], k and v [B, S_kv, H_kv, D].
    Returns: [B, S_q - first, H, D] in dtype.
    """
    batch, seq_q, heads, head_dim = q.shape
    seq_kv, group = k.shape[1], heads // k.shape[2]
    skipped = unpack(lists.lists, -(-seq_kv // lists.block_k))
    out = torch.empty(batch, seq_q - first, heads, head_dim, dtype=dtype, device=q.device)
    for b, h in ((b, h) for b in range(batch) for h in range(heads)):
        keys, values = (x[b, :, h // group].to(dtype) for x in (k, v))
        if lists.compensates:
            means = [torch.stack([y.mean(0) for y in x.split(lists.block_k)]) for x in (keys, values)]
            number = torch.tensor([len(y) for y in keys.split(lists.block_k)], dtype=dtype, device=q.device)
        for start in range(first, seq_q, ROWS_AT_ONCE):
            rows = torch.arange(start, min(start + ROWS_AT_ONCE, seq_q), device=q.device)
            scores = q[b, rows, h].to(dtype) @ keys.T * head_dim**-0.5
            hidden = skipped[b, h, rows // lists.block_q].repeat_interleave(lists.block_k, -1)[:, :seq_kv]
            scores, seen = scores.masked_fill_(hidden, -math.inf), values
            if lists.compensates:
                of_means = q[b, rows, h].to(dtype) @ means[0].T * head_dim**-0.5 + number.log()
                of_means.masked_fill_(~skipped[b, h, rows // lists.block_q], -math.inf)
                scores, seen = torch.cat([scores, of_means], -1), torch.cat([values, means[1]])
            out[b, rows - first, h] = scores.softmax(-1) @ seen
    return out


def listed_attention(shape: Shape, lists: SkipState):
    """Replace scaled_dot_product_attention of this shape by fp32 attention to the visited tiles."""
    original = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, *arguments, **options):
        batch, heads, seq_q, head_dim = query.shape
        if Shape(batch, heads, seq_q, key.shape[2], head_dim) != shape:
            return original(query, key, value, *arguments, **options)
        tokens = (x.transpose(1, 2) for x in (query, key, value))
        return attend_listed(*tokens, lists, dtype=torch.float32).to(query.dtype).transpose(1, 2)

    return attention_as(attend)


class RandomLists(SkipLists):
    """The same random lists for every call of one shape, at all steps.

    Nothing is measured, and calls of other shapes skip nothing.

    Args: sites: number of call sites in the model's ScaleState. given: lists of that shape.
    """

    def __init__(self, sites: int, shape: Shape, given: SkipState) -> None:
        super().__init__(sites, given.now.device, limit=float(given.limit), every=given.every)
        self._shape, self._given = shape, given

    def _look_up(self, site, q, k, recipe):
        batch, seq_q, heads, head_dim = q.shape
        if Shape(batch, heads, seq_q, k.shape[1], head_dim) != self._shape:
            return "short", None
        return "", self._given._replace(totals=self.totals[site])

    def _stay(self, *_) -> None:
        """Do nothing: the lists stay the same over steps and runs."""

    next_step = place = in_order = stop = clear = _stay


def give_lists(handle, shape: Shape, given: SkipState) -> None:
    """Give these lists to all layers of a handle, for calls of this shape. The handle must not have skip=."""
    for denoiser in handle._denoisers:
        denoiser.state.kept.skip_lists = RandomLists(len(denoiser.state.sites), shape, given)
        denoiser._hand_out()  # calls find their lists by the tensors of their site


def check_share(report, given: SkipState, shape: Shape, share: float, calls: int) -> None:
    """Raise ValueError unless layers with `calls` calls or more left out this share of their tiles."""
    listed = [row for row in report.rows if row["skipped_fraction"]]
    shares, tiles = [row["skipped_fraction"] for row in listed], -(-shape.seq_kv // given.block_k)
    left_out = round(share * tiles) / tiles
    if not listed or sum(row["calls"] for row in listed) < calls:
        raise ValueError(f"{len(listed)} layers left out tiles, expected all that have {calls} calls together")
    if any(abs(share - left_out) > 1e-6 for share in shares):
        raise ValueError(f"{min(shares):.3f} to {max(shares):.3f} of the tiles left out, expected {left_out:.3f}")
