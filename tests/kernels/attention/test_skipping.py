"""Key tiles that are not visited: what rows lose is bounded, measured anew in turn, and never hides a change."""

from __future__ import annotations

import math

import pytest
import torch

import sage_kernels
from sage_kernels import new_skip_state, sage_attention
from sage_kernels.facts.skipping import (
    CLOCK_CALLS,
    CLOCK_LAST,
    LEVELS,
    SHARE_SLACK,
    TOTAL_FIELDS,
    empty_lists,
    list_bytes,
    pack,
    totals_of,
    unpack,
)
from sage_kernels.ops.skip_state import skip_block
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.reference.attention import ref_attention
from sage_kernels.reference.skipping import ref_levels, ref_list
from sage_kernels.testing import assert_matches_reference, make_qkv
from tests.kernels.attention.attention_cases import FP8, runs_fp8, without_interpreter


HEADS, HEAD_DIM = 2, 64
# fp32 keeps an LSE below 64 to 2^-19, and a loss is an exponential of a difference of two
LSE_ROUNDING = 2.0**-17


def scores_of(family: str, seq_q: int, seq_kv: int, seed: int = 0, heads: int = HEADS):
    """q, k, v [1, S, H, D] whose scores are random, fall with the key's place, sink into one key, or are clustered."""
    q, k, v = make_qkv("normal", 1, seq_q, seq_kv, heads, 1, HEAD_DIM, seed=seed)
    direction = torch.nn.functional.normalize(torch.randn(HEAD_DIM, generator=torch.Generator().manual_seed(9)), dim=0)
    if family == "sorted":
        q, k = 0.3 * q + 8 * direction, 0.3 * k + torch.linspace(14, -14, seq_kv)[None, :, None, None] * direction
    elif family == "sink":
        q = 0.3 * q + 8 * direction
        k[:, 3] += (13 + math.log(seq_kv / 330)) * direction  # all others have one share together, however many
    elif family == "clustered":  # row and key see each other where they are of one cluster; clusters lie in runs
        centers = torch.randn(8, HEAD_DIM, generator=torch.Generator().manual_seed(5))
        centers = 9 * torch.nn.functional.normalize(centers, dim=1)
        q = 0.3 * q + centers[torch.arange(seq_q) * 8 // seq_q][None, :, None]
        k = 0.3 * k + centers[torch.arange(seq_kv) * 8 // seq_kv][None, :, None]
    return q.half(), k.half(), v.half()


FAMILIES = ("random", "sorted", "sink", "clustered")


def new_lists(shape, block, device, *, every=2, limit=0.2, compensates=False):
    """Empty lists of calls of a shape B, H, S_q, S_kv in tiles of this size."""
    now = torch.zeros((), dtype=torch.int32, device=device)
    totals = torch.zeros(TOTAL_FIELDS, dtype=torch.int64, device=device)
    limit = torch.full((), limit, device=device)
    return empty_lists(*shape, block, every=every, now=now, limit=limit, totals=totals, compensates=compensates)


def new_state(device="cpu"):
    """Scales of one key head, without a plan."""
    return ScaleState([Site("a", 1, HEAD_DIM)], device=device).head_state(0)


class Lists:
    """One call site on one implementation: its scales, its lists, and dense calls of the same scales."""

    def __init__(self, attend, shape, *, recipe=sage_kernels.DEFAULT_RECIPE, block=None, **options):
        """shape: B, H, S_q, S_kv. block: of a tile, where the implementation takes any."""
        self.attend, self.recipe = attend, recipe
        device = attend.device
        block = block or {"reference": (32, 32), "interpreter": (64, 64)}.get(attend.tier)
        block = block or skip_block(device, HEAD_DIM, recipe)
        self.lists = new_lists(shape, block, device, **{"limit": 0.05, "every": 4, **options})

    def state(self):
        return new_state(self.attend.device)

    def __call__(self, q, k, v):
        """out, lse of a step with the lists, which then have a step more."""
        result = self.attend(q, k, v, state=self.state(), skip=self.lists, recipe=self.recipe)
        self.lists.now.add_(1)
        return result

    def whole(self, q, k, v):
        """out, lse of a call with lists of the same tiles that skip nothing, and so of the same scales."""
        lists = self.lists._replace(**{name: getattr(self.lists, name).clone() for name in self.lists._fields[:7]})
        lists.limit.zero_()
        return self.attend(q, k, v, state=self.state(), skip=lists, recipe=self.recipe)

    def lost(self, q, k, v, lse):
        """Share of its probability that each row [B, S_q, H] lost, of the op's own scores: fp64."""
        _, whole = self.whole(q, k, v)
        return 1 - (lse.double() - whole.double()).exp()

    def by_tile(self, rows):
        """The largest of rows [B, S_q, H] in each tile of query rows, [B, H, M]."""
        padded = torch.nn.functional.pad(rows.transpose(1, 2), (0, -rows.shape[1] % self.lists.block_q))
        return padded.unflatten(2, (-1, self.lists.block_q)).amax(-1)

    @property
    def skipped(self):
        """Share of pairs of tiles that the lists skip."""
        tiles = -(-self.seq_kv // self.lists.block_k)
        return float(unpack(self.lists.lists, tiles).double().mean())


def site_of(attend, q, k, **options):
    site = Lists(attend, (1, q.shape[2], q.shape[1], k.shape[1]), **options)
    site.seq_kv = k.shape[1]
    return site


LENGTHS = {"reference": (150, 330), "interpreter": (100, 330), "cuda": (1000, 2500)}


def lengths(attend):
    """S_q and S_kv with ragged ends: enough tiles of the implementation, and no more."""
    return LENGTHS[attend.tier]


# --- the bound ---


@pytest.mark.parametrize("compensates", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_T20_no_row_loses_more_than_the_bound_of_its_list(family, compensates, attend):
    """In the step that a list is made in, by the implementation's own log-sum-exps with and without the list."""
    q, k, v = scores_of(family, *lengths(attend), heads=1 if attend.tier == "interpreter" else HEADS)
    for limit in (0.02, 0.5) if attend.tier != "interpreter" else (0.2,):
        holds_its_bound(site_of(attend, q, k, limit=limit, compensates=compensates), family, q, k, v)


def holds_its_bound(site, family, q, k, v):
    """A first call of the site, which makes all lists."""
    out, lse = site(q, k, v)
    lost, bound = site.lost(q, k, v, lse), site.lists.bound.cpu()
    assert (site.by_tile(lost) <= bound + LSE_ROUNDING).all()
    assert (bound <= float(site.lists.limit) / 2).all()
    if family != "random":
        assert site.skipped > 0.2  # else nothing is shown
        assert float(lost.max()) > 0
    if site.attend.tier == "interpreter":
        return  # its outputs are held against the reference
    whole, _ = site.whole(q, k, v)
    # |out - whole| <= 2 · lost · max|v|, and both are rounded to fp16
    assert ((out - whole).abs().float() <= 2 * (lost[..., None] + LSE_ROUNDING) * v.abs().max() + 4e-3).all()


# query rows and keys of a tile: Hopper's at each width and format of P·V, and those of other GPUs
BLOCKS = ((192, 64), (128, 128), (128, 64), (128, 32), (64, 64), (32, 32))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_T20_the_bound_holds_in_the_tiles_and_lengths_of_every_gpu(block, family):
    """The specification: what is asked of the kernels there can be met, and shows something."""
    q, k, v = scores_of(family, *LENGTHS["cuda"])
    for limit, compensates in ((0.02, False), (0.5, False), (0.5, True)):
        site = site_of(Reference(), q, k, limit=limit, block=block, compensates=compensates)
        holds_its_bound(site, family, q, k, v)


@pytest.mark.parametrize("seed", range(4))
def test_T20_the_bound_holds_for_shares_of_every_kind(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, tiles = 5, 40
    spread = (0.1, 1.0, 8.0, 40.0)[seed]
    shares = (spread * torch.randn(rows, tiles, generator=generator)).softmax(-1)
    for limit in (1e-6, 1e-3, 0.3, 0.99):
        skipped, bound = ref_list(shares, limit)
        lost = shares.double()[:, skipped].sum(-1).max() if skipped.any() else torch.tensor(0.0)
        assert float(lost) <= float(bound) <= limit / 2
        assert not skipped.all()
        # and no more than the byte that a share is kept in makes of it, once for every row that may be the worst
        most = shares[:, skipped].amax(0).sum() * SHARE_SLACK * 2 ** (1 / LEVELS) if skipped.any() else 0.0
        assert float(bound) <= float(most) * (1 + 1e-5) + tiles * 2.0**-63
        # the list takes all that fits: the next level would not
        level = ref_levels(shares)
        following = level[~skipped].max()
        assert float(torch.exp2(level[level >= following].float() / -LEVELS).sum()) > limit / 2


def test_lists_are_packed_into_bits_and_back():
    skipped = torch.rand(2, 3, 75, generator=torch.Generator().manual_seed(0)) < 0.5
    words = pack(skipped)
    assert words.shape == (2, 3, 3) and words.dtype == torch.int32
    assert torch.equal(unpack(words, 75), skipped)


def test_T21_the_memory_of_a_video_model_is_a_bit_a_pair_of_tiles():
    """75 600 tokens (720p of Wan), 40 heads, 40 layers: what the documentation says."""
    call = list_bytes(1, 40, 75_600, 75_600, 192, 64)
    assert call == 4 * (40 * (394 * (37 + 1) + 2) + 5)  # 394 query tiles, 1 182 key tiles in 37 words
    assert round(40 * call / 1e6) == 96
    lists = new_skip_state(1, 2, 1000, 1000, 64, "cpu")
    assert lists.nbytes == list_bytes(1, 2, 1000, 1000, lists.block_q, lists.block_k)


# --- the kernels against the specification ---


@pytest.mark.usefixtures("true_fp8")
@pytest.mark.parametrize("compensates", [False, True])
@pytest.mark.parametrize("recipe", [sage_kernels.DEFAULT_RECIPE, FP8])
def test_outputs_are_those_of_the_visited_tiles(recipe, compensates, attend):
    if attend.tier == "reference" or (recipe == FP8 and not runs_fp8(attend.tier)):
        pytest.skip("the reference is what it is held against; or a GPU without FP8")
    q, k, v = scores_of("clustered", *lengths(attend), heads=1)
    site = site_of(attend, q, k, limit=0.3, recipe=recipe, compensates=compensates)
    out, lse = site(q, k, v)
    assert site.skipped > 0.2
    lists = copied(site.lists)
    lists.clock[CLOCK_LAST] = lists.now  # no step since: nothing is due: the reference takes the lists as they are
    assert_matches_reference(
        out, lse, q, k, v, state=type(site.state())(*(x.cpu() for x in site.state())), skip=lists, recipe=recipe,
        first_max=attend.first_max,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [sage_kernels.DEFAULT_RECIPE, FP8])
@pytest.mark.parametrize("seq_kv", [4096, 4130])
def test_programs_share_lists_of_any_length(recipe, seq_kv):
    """Cut along the keys where a call has few query tiles: some pieces of a short list are empty. Sums of two calls,
    of which the second has the row maxima of the first."""
    q, k, v = (x.cuda() for x in make_qkv("normal", 1, 700, seq_kv, 2, 1, 128, seed=3, dtype=torch.bfloat16))
    scales = ScaleState([Site("a", 1, 128)], device="cuda")
    row_max = torch.full((1, 2, 700), torch.nan, device="cuda")
    lists = sage_kernels.new_skip_state(1, 2, 700, seq_kv, 128, "cuda", recipe=recipe, limit=0.5, every=4)
    tiles, query_tiles = -(-seq_kv // lists.block_k), lists.lists.shape[2]
    kept = torch.zeros(1, 2, query_tiles, tiles, dtype=torch.bool, device="cuda")
    order = torch.rand(kept.shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda").argsort(-1)
    for i, (h, m) in enumerate((h, m) for h in range(2) for m in range(query_tiles)):
        number = (1, 2, 3, 7, tiles, tiles - 1, 17)[i % 7]
        kept[0, h, m] = order[0, h, m] < number
        kept[0, h, m, -1] |= i % 2 == 0  # the ragged one, which a list has at its other end
    lists.lists.copy_(pack(~kept))
    lists.clock[CLOCK_LAST] = lists.now  # no step since: nothing is measured
    hidden = ~kept[0].repeat_interleave(lists.block_q, 1)[:, :700].repeat_interleave(lists.block_k, 2)[..., :seq_kv]
    scores = torch.einsum("qhd,kd->hqk", q[0].double(), k[0, :, 0].double()) * 128**-0.5
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    wanted = torch.einsum("hqk,kd->qhd", weights, v[0, :, 0].double())
    for known in (False, True):
        state = scales.head_state(0)
        state = state.keeping(row_max, known) if recipe == FP8 else state
        out = sage_kernels.sage_attention(q, k, v, state=state, skip=lists, recipe=recipe)[0].double()
        worst = ((out - wanted).norm(dim=-1) / wanted.norm(dim=-1)).amax()
        assert float((out - wanted).norm() / wanted.norm()) < (0.06 if recipe == FP8 else 0.03)
        assert float(worst) < (0.2 if recipe == FP8 else 0.1)
        scales.advance(1.0, 0.9)


def copied(lists):
    """The same lists on the CPU, without alarms."""
    own = lists._replace(**{name: getattr(lists, name).cpu().clone() for name in lists._fields[:7]})
    own.alarms.zero_()
    return own


@pytest.mark.parametrize("cut", [False, True])
def test_lists_over_steps_are_those_of_the_specification(cut, kernel_device, monkeypatch):
    from tests.kernels.attention.attention_cases import Attend

    kernels = Attend("cuda" if kernel_device.type == "cuda" else "interpreter", monkeypatch)
    seq_q, seq_kv = lengths(kernels)
    q, k, v = scores_of("clustered", seq_q, seq_kv, heads=1)
    site = site_of(kernels, q, k, every=2, limit=0.1, compensates=cut)
    given = copied(site.lists)
    for step in range(3):
        if cut and step == 2:
            k = k.roll(seq_kv // 2, 1)
        site(q, k, v)
        ref_attention(q, k, v, state=new_state(), skip=given)
        given.now.add_(1)
        q = q + 0.1 * torch.randn(q.shape, generator=torch.Generator().manual_seed(step)).half()
    ours = copied(site.lists)
    # a level is a floor: a rounding of fp32 may move one, and with it a tile at the edge of what fits
    different = unpack(ours.lists ^ given.lists, -(-seq_kv // ours.block_k))
    assert float(different.double().mean()) <= 0.01
    assert torch.equal(ours.clock, given.clock)
    assert torch.equal(site.lists.alarms.cpu(), given.alarms)
    mine, theirs = totals_of(ours.totals), totals_of(given.totals)
    assert mine["measured"] == theirs["measured"] > 0 and (mine["beyond"] > 0) == cut == (theirs["beyond"] > 0)
    assert mine["lost_max"] == pytest.approx(theirs["lost_max"], rel=0.05, abs=1e-6)
    assert mine["skipped_fraction"] == pytest.approx(theirs["skipped_fraction"], abs=0.01)


# --- compensation ---


@pytest.mark.parametrize("seed", range(4))
def test_mean_keys_never_move_more_of_a_row_than_dropping_does(seed):
    """For any scores and any list: half the distance of the rows' weights, fp64, is at most what dropping has, and
    the sum is never above the true one."""
    generator = torch.Generator().manual_seed(seed)
    rows, tiles, keys = 7, 12, 16
    scores = (0.3, 2.0, 8.0, 30.0)[seed] * torch.randn(rows, tiles, keys, generator=generator, dtype=torch.float64)
    scores[:, 0] = scores[:, 0, :1]  # a flat tile
    skipped = torch.rand(tiles, generator=generator) < 0.5
    skipped[0], skipped[1] = True, False
    true = scores.flatten(1).softmax(-1)
    means = scores.mean(-1, keepdim=True).expand_as(scores)
    pooled = torch.where(skipped[:, None], means, scores).flatten(1)
    dropped = torch.where(skipped[:, None], -torch.inf, scores).flatten(1)
    assert (pooled.logsumexp(-1) <= scores.flatten(1).logsumexp(-1) + 1e-12).all()
    moved, lost = ((x.softmax(-1) - true).abs().sum(-1) / 2 for x in (pooled, dropped))
    assert (moved <= lost + 1e-12).all() and (moved < lost).any()


@pytest.mark.parametrize("block", [(192, 64), (64, 32)])
@pytest.mark.parametrize("family", (*FAMILIES, "needles"))
def test_compensation_is_closer_to_the_truth_than_dropping_by_the_same_lists(family, block):
    """Against fp64 attention to all keys: in the mean over rows, and in the worst row. "needles", against it: in each
    tile a few keys have all the weight, and the mean value is of the others."""
    q, k, v = scores_of("random" if family == "needles" else family, 300, 1130)
    if family == "needles":
        k[:, ::32] += 2 * torch.nn.functional.normalize(q.float().mean(1, keepdim=True)[:, :, :1], dim=-1).half()
        v = (torch.where(torch.arange(1130) % 32 == 0, 1.0, -1.0)[None, :, None, None] + 0.1 * v).half()
    scores = torch.einsum("qhd,kd->hqk", q[0].double(), k[0, :, 0].double()) * HEAD_DIM**-0.5
    true = torch.einsum("hqk,kd->qhd", scores.softmax(-1), v[0, :, 0].double())
    lists = new_lists((1, HEADS, 300, 1130), block, "cpu")
    tiles = -(-1130 // block[1])
    skipped = torch.rand(*lists.lists.shape[:3], tiles, generator=torch.Generator().manual_seed(0)) < 0.5
    lists.lists.copy_(pack(skipped))
    lists.clock[CLOCK_LAST] = lists.now  # no step since: the lists stay
    errors = []
    for compensates in (False, True):
        of_kind = lists._replace(compensates=compensates)
        out = sage_attention(q, k, v, state=new_state(), skip=of_kind)
        errors.append((out[0].double() - true).norm(dim=-1))
    dropped, compensated = errors
    assert compensated.mean() <= dropped.mean() + 1e-4 and compensated.max() <= dropped.max() + 1e-3


# --- over steps ---


@without_interpreter
def test_T22_each_query_tile_is_measured_once_in_so_many_steps(attend):
    q, k, v = scores_of("clustered", *lengths(attend), heads=1)
    site = site_of(attend, q, k, every=3)
    last = torch.zeros(site.lists.bound.shape, dtype=torch.long)
    for step in range(7 if attend.tier == "reference" else 4):
        site.lists.bound.fill_(-1.0)
        site(q, k, v)
        measured = site.lists.bound.cpu() >= 0
        assert measured.all() if step == 0 else (measured.any() and not measured.all())
        last = torch.where(measured, step, last)
        assert (step - last < 3).all()  # in turns of the query tiles that there are, where they are fewer


def test_T22_steps_that_leave_a_layer_out_are_made_up_for():
    """Attention caches: what was due meanwhile is measured in the next call, and all of it after `every` steps."""
    attend = Reference()
    q, k, v = scores_of("clustered", 300, 330, heads=1)
    for gap, expected in ((1, 1 / 5), (2, 2 / 5), (4, 4 / 5), (5, 1.0), (9, 1.0)):
        site = site_of(attend, q, k, every=5)
        assert site.lists.lists.shape[2] == 10
        site(q, k, v)
        site.lists.now.add_(gap - 1)
        site.lists.bound.fill_(-1.0)
        site(q, k, v)
        assert float((site.lists.bound >= 0).double().mean()) == pytest.approx(expected)


class Reference:
    """The op on the CPU, as the fixture `attend` has it, where one implementation is enough."""

    tier, device = "reference", torch.device("cpu")

    def __call__(self, q, k, v, **options):
        return sage_attention(q, k, v, return_lse=True, **options)


def test_T23_a_cut_is_seen_before_anything_is_lost_to_it(attend):
    """Lists of other keys: the query tiles that are due in that step find it, and the head visits everything."""
    seq_q, seq_kv = lengths(attend)
    q, k, v = scores_of("clustered", seq_q, seq_kv, heads=1)
    site = site_of(attend, q, k, every=2, limit=0.05)
    site(q, k, v)
    before = site.skipped
    k, v = k.roll(seq_kv // 2, 1), v.roll(seq_kv // 2, 1)
    _, lse = site(q, k, v)
    assert float(site.lost(q, k, v, lse).max()) <= 0.05 + LSE_ROUNDING
    assert totals_of(site.lists.totals.cpu())["beyond"] > 0
    assert site.skipped < before  # what was not measured is visited
    _, lse = site(q, k, v)  # all of it is measured
    assert site.skipped > 0.1
    assert float(site.lost(q, k, v, lse).max()) <= 0.05 / 2 + LSE_ROUNDING


@without_interpreter
def test_T24_a_jump_of_steps_is_another_run(attend):
    """Bit for bit what empty lists give, and what was drawn before leaves nothing."""
    q, k, v = scores_of("clustered", *lengths(attend), heads=1)
    other = scores_of("sorted", *lengths(attend), heads=1, seed=1)
    first, again = (site_of(attend, q, k, every=4) for _ in range(2))
    again(*other)
    again.lists.now.add_(6)
    for _ in range(2):
        ours, expected = again(q, k, v), first(q, k, v)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
        assert torch.equal(again.lists.lists, first.lists.lists)


def test_a_limit_of_nothing_visits_everything():
    attend = Reference()
    q, k, v = scores_of("clustered", 150, 330)
    site = site_of(attend, q, k)
    site(q, k, v)
    kept = site.lists.lists.clone()
    site.lists.limit.zero_()
    out, lse = site(q, k, v)
    blocks = {"block_q": site.lists.block_q, "block_k": site.lists.block_k}
    whole, whole_lse = ref_attention(q, k, v, state=site.state(), **blocks)
    assert torch.equal(out, whole) and torch.equal(lse, whole_lse)
    assert torch.equal(site.lists.lists, kept) and int(site.lists.clock[CLOCK_LAST]) == 0
    site.lists.limit.fill_(0.05)  # the lists are two steps old
    site(q, k, v)
    assert int(site.lists.clock[CLOCK_CALLS]) == 3 and kept.any()


def test_V40_numbers_that_are_none_are_not_skipped(attend):
    """In a query: its tile visits everything. In a key of a skipped tile: rows that are due find it, all then do."""
    q, k, v = scores_of("sorted", *lengths(attend), heads=1)
    site = site_of(attend, q, k, every=2)
    site(q, k, v)
    assert unpack(site.lists.lists, -(-k.shape[1] // site.lists.block_k))[..., -1].all()  # the last keys are skipped
    bad = k.clone()
    bad[:, -1, :, 5] = torch.nan
    out, _ = site(q, bad, v)
    assert torch.isnan(out).all()
    site = site_of(attend, q, k, every=2)
    poisoned = q.clone()
    poisoned[:, 1, :, 7] = torch.nan
    out, _ = site(poisoned, k, v)
    assert torch.isnan(out[:, 1]).all() and torch.isfinite(out[:, 2:]).all()
    assert not unpack(site.lists.lists[:, :, 0], -(-k.shape[1] // site.lists.block_k)).any()


# --- inputs ---


WRONG = {
    "no SkipState": (lambda lists: tuple(lists), TypeError, "expected sage_kernels.SkipState"),
    "another length": (lambda lists: lists._replace(lists=lists.lists[:, :, :-1].contiguous()), ValueError, "lists"),
    "another type": (lambda lists: lists._replace(bound=lists.bound.double()), ValueError, "bound"),
    "strided": (lambda lists: lists._replace(alarms=lists.alarms.expand(2, 1, 1).mT), ValueError, "alarms"),
    "no tensor": (lambda lists: lists._replace(now=3), TypeError, "now"),
    "another device": (lambda lists: lists._replace(limit=lists.limit.to("meta")), ValueError, "limit"),
    "never measured": (lambda lists: lists._replace(every=0), ValueError, "every"),
    "compensation of a kind": (lambda lists: lists._replace(compensates=1), ValueError, "compensates"),
    "tiles of nothing": (lambda lists: lists._replace(block_k=0), ValueError, "block_k"),
}


@pytest.mark.parametrize("name", WRONG)
def test_Q50_lists_of_another_kind_are_an_error(name):
    change, error, words = WRONG[name]
    q, k, v = scores_of("random", 100, 200, heads=1)
    lists = change(new_skip_state(1, 1, 100, 200, HEAD_DIM, "cpu"))
    if name == "strided":
        lists = lists._replace(alarms=torch.zeros(4, 1, 1, dtype=torch.int32)[::2])
    with pytest.raises(error, match=words):
        sage_attention(q, k, v, state=new_state(), skip=lists)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": 9},
        {"softcap": 3.0},
        {"sinks": torch.zeros(1)},
        {"attn_mask": torch.ones(100, 100, dtype=torch.bool)},
    ],
)
def test_Q50_lists_beside_a_mask_are_an_error(options):
    q, k, v = scores_of("random", 100, 100, heads=1)
    lists = new_skip_state(1, 1, 100, 100, HEAD_DIM, "cpu")
    with pytest.raises(NotImplementedError, match="leave skip out"):
        sage_attention(q, k, v, state=new_state(), skip=lists, **options)
    with pytest.raises(ValueError, match="without a state"):
        sage_attention(q, k, v, skip=lists)


@pytest.mark.parametrize("options", [{"limit": 1.0}, {"limit": -0.1}, {"limit": float("nan")}, {"every": 0}])
def test_limits_and_turns_out_of_range_are_errors(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        new_skip_state(1, 1, 100, 100, 64, "cpu", **options)


def test_lists_of_other_tiles_than_the_kernels_are_an_error(kernel_device):
    from sage_kernels._triton.attention.launch import launch_attention_fwd

    q, k, v = (x.to(kernel_device) for x in scores_of("random", 100, 200, heads=1))
    lists, state = new_lists((1, 1, 100, 200), (16, 16), kernel_device), new_state(kernel_device)
    with pytest.raises(ValueError, match="new_skip_state"):
        launch_attention_fwd(
            q, k, v, scale=0.1, scaling="planned", smooth_k=True, state=state, return_lse=False, skip=lists
        )


@pytest.mark.parametrize("seq_q", [250, 330])
def test_tiles_of_several_parts_are_measured_as_one(seq_q, kernel_device):
    """Hopper's tiles of 192 rows: three programs measure one, or one alone. Of two samples and heads on a key head.

    What a list had lost counts once for a tile of query rows, by its worst row, whatever part of it that is in.
    """
    from sage_kernels._triton.attention.skip_tiles import launch_skip_tiles
    from sage_kernels._triton.prologue.mask_tiles import MaskTiles
    from sage_kernels._triton.prologue.prologue import launch_prologue

    q, k, v = (torch.cat([x, x.flip(1)]) for x in scores_of("clustered", seq_q, 330))
    lists = new_lists((2, HEADS, seq_q, 330), (192, 64), kernel_device)
    given = copied(lists)

    def step(q):
        state = new_state(kernel_device)
        queries, keys = q.to(kernel_device), k.to(kernel_device)
        prepared = launch_prologue(
            queries, keys, None, scaling="planned", smooth_k=True, state=state, mask=MaskTiles(), return_center=False,
            block_n=64, width=64, rotation="none",
        )  # fmt: skip
        found, _ = launch_skip_tiles(queries, prepared, lists, kv_heads=1, seq_kv=330, scale=HEAD_DIM**-0.5, width=64)
        ref_attention(q, k, v, state=new_state(), skip=given)
        lists.now.add_(1)
        given.now.add_(1)
        return found

    found = step(q)
    skipped = unpack(given.lists, 6)
    assert 0.1 < float(skipped.double().mean()) < 0.9
    if kernel_device.type == "cpu":  # a GPU may round a share over the edge of a level
        assert torch.equal(lists.lists.cpu(), given.lists)
    torch.testing.assert_close(lists.bound.cpu(), given.bound, rtol=0.2, atol=1e-6)
    # what the attention kernels read: wholly inside first, the ragged tile from the back
    ours = unpack(lists.lists.cpu(), 6).flatten(0, 2)
    for row, (full, visited), left_out in zip(found.tiles.cpu(), found.numbers.tolist(), ours, strict=True):
        wanted = [tile for tile in range(6) if not left_out[tile]]
        assert row[:full].tolist() == [tile for tile in wanted if tile < 5]
        assert row[6 - (visited - full) :].tolist() == [tile for tile in wanted if tile == 5]

    assert totals_of(given.totals)["measured"] == 0  # the lists were void: none had lost anything
    # one tile of query rows of two is due in each head: its first 64 rows see what they saw, later ones something else
    first = 256 if seq_q > 256 else 192
    step(torch.cat([q[:, :first], q[:, : seq_q - first]], 1))
    mine, theirs = totals_of(lists.totals.cpu()), totals_of(given.totals)
    assert mine["measured"] == theirs["measured"] == 2 * HEADS and mine["beyond"] == theirs["beyond"] > 0
    for name in ("lost_max", "lost_mean"):
        assert mine[name] == pytest.approx(theirs[name], rel=0.05)
    assert torch.equal(lists.alarms.cpu(), given.alarms) and torch.equal(lists.clock.cpu(), given.clock)
