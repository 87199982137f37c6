"""The launch that plans the next step against the tensor operations that it replaces."""

from __future__ import annotations

import copy

import pytest
import torch

import sage_kernels
from sage_kernels.facts.state import (
    COUNT_KEY_MAX,
    COUNT_STEADY,
    KEY_NONE,
    STAT_K_MAX,
    STAT_K_MIN,
    STAT_Q_AMAX,
    STAT_V_AMAX,
)
from sage_kernels.ops.plan_step import plan_step
from sage_kernels.planning.rules import Timestep, TimestepAdaptive
from sage_kernels.planning.state import ScaleState, Site
from sage_kernels.testing import make_qkv


SITES = [Site("a", 3, 40), Site("b", 2, 128), Site("c", 1, 8)]
BY_CPU = {"interpreter": "cpu"}
devices = pytest.mark.parametrize("device", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])


def in_one_launch(state, finished, following, begins=None):
    """`_advance_in_one_launch`, on a CPU in Triton's interpreter."""
    if state.device.type == "cuda":
        state._advance_in_one_launch(finished, following, begins)
        return
    from sage_kernels._triton.prologue.plan_step import launch_plan_step

    launch_plan_step(*state._launch_tensors(finished, following, begins), **state._launch_numbers())
    if begins is not None:
        state._run.add_(begins)


def record(state, generator, *, growth=1.0):
    """What the kernels would leave of a step: most heads seen; one skipped, one of zeros, one with a NaN."""
    shared, rows = state._shared, state._is_channel.shape[0]
    size = torch.rand(4, *state._is_channel.shape, generator=generator) * growth + 0.01
    size[:, torch.rand(state._is_channel.shape, generator=generator) < 0.1] = 0.0
    center = torch.randn(state._is_channel.shape, generator=generator)
    size = torch.where(state._is_channel.cpu(), size, 0.0)
    roles = torch.randperm(rows, generator=generator)
    values = {STAT_Q_AMAX: size[0], STAT_K_MAX: center + size[1], STAT_K_MIN: center - size[1], STAT_V_AMAX: size[2]}
    for field, value in values.items():
        value[roles[1]] = 0.0
        value[roles[2], 0] = torch.nan if field == STAT_Q_AMAX else value[roles[2], 0]
        shared.stats[:, field] = torch.where(state._is_channel, value.to(state.device), shared.stats[:, field])
    calls = torch.randint(1, 4, (rows,), generator=generator, dtype=torch.int32)
    calls[roles[0]] = 0
    counts = torch.randint(0, 1000, (rows, COUNT_KEY_MAX), generator=generator, dtype=torch.int32)
    counts[:, 0] = calls
    shared.counts[:, :COUNT_KEY_MAX] = counts.to(state.device)
    keys = torch.randint(KEY_NONE + 1, 2**31 - 1, (rows, 2), generator=generator, dtype=torch.int32)
    shared.counts[:, COUNT_KEY_MAX : COUNT_KEY_MAX + 2] = keys.to(state.device)


def tensors_of(state):
    shared = state._shared
    return {
        "plan": shared.plan, "plan_scale": shared.plan_scale, "stats": shared.stats, "counts": shared.counts,
        "table": state._table, "table_run": state._table_run, "totals": state._totals, "run": state._run,
    }  # fmt: skip


# levels that share a bin, that come back and that no run before has seen; 9: another run begins within the walk
WALKS = [[0, 0, 1, 3, 4], [0, 2, 1, 9, 1, 4, 0], [0, 2, 1, 1, 4], [3, 9, 0, 9, 2]]
RUN = 9


@devices
@pytest.mark.parametrize("margin", [0.9, 1.25])
@pytest.mark.parametrize("rule", [Timestep, TimestepAdaptive])
def test_one_launch_does_what_the_tensor_operations_do(device, margin, rule):
    state = ScaleState(SITES, device=BY_CPU.get(device, device), margin=margin, bins=5, rule=rule())
    generator = torch.Generator().manual_seed(7)
    planned, kept, strayed, refuted, held, steady, not_steady = (0,) * 7
    for run, walk in enumerate(WALKS):
        if run == 2:
            state.freeze()
        state.begin_run(1.0)
        begins = torch.zeros((), dtype=torch.int32, device=state.device)
        for step, (finished, following) in enumerate(zip(walk, walk[1:], strict=False)):
            if finished == RUN:
                continue
            begins.fill_(int(following == RUN))
            following = walk[step + 2] if following == RUN else following
            # now and then a step of another size, as one odd token makes it
            again = torch.Generator().manual_seed(step // 2) if run % 2 else generator
            record(state, again, growth=(1.0, 3.0, 300.0, 1.0)[(run + step) % 4] if again is generator else 1.0)
            other = copy.deepcopy(state)
            bins = [torch.tensor([x], device=state.device) for x in (finished, following)]
            seen, before, marks = state._seen(), state._shared.plan_scale.clone(), state._table_run[finished].clone()
            strayed += int((state.strayed() & seen & state.usable(state._table_run[following])).sum())
            kept += int((~seen & (before > 0)).sum())
            state._advance(*bins, begins)
            in_one_launch(other, *bins, begins)
            planned += int((state._shared.plan_scale > 0).sum())
            refuted += int((seen & (state._table_run[finished] == marks) & (before > 0)).sum())
            held += int((seen & (marks != 0) & (before == 0)).sum())
            steady += int(state._shared.counts[:, COUNT_STEADY].sum())
            not_steady += int((seen & (before > 0) & (state._shared.counts[:, COUNT_STEADY] == 0)).sum())
            for (name, a), b in zip(tensors_of(state).items(), tensors_of(other).values(), strict=True):
                if name in ("plan", "plan_scale"):  # torch's own sqrt and division are an ulp off, by device
                    assert torch.allclose(a, b, rtol=1e-6, atol=0.0), (run, step, name)
                    assert torch.equal(a == 0.0, b == 0.0), (run, step, name)
                else:
                    assert torch.equal(a, b), (run, step, name)
    assert planned and kept and strayed and refuted and held and steady and not_steady  # else half of it was not tried


@devices
def test_a_head_that_was_never_called_stays_without_a_plan(device):
    state = ScaleState(SITES, device=BY_CPU.get(device, device))
    bins = torch.zeros(1, dtype=torch.int64, device=state.device)
    in_one_launch(state, bins, bins + 1)
    assert not state._shared.plan_scale.any()
    assert not state._table_run.any()
    assert torch.isfinite(state._shared.plan).all()


@pytest.mark.gpu
def test_a_state_on_a_gpu_advances_in_few_launches():
    state = ScaleState(SITES, device="cuda")
    levels = torch.tensor([1.0, 0.9], device="cuda")
    state.advance(*levels)  # compiles
    q, k, v = (x.to("cuda", torch.bfloat16) for x in make_qkv("normal", 1, 64, 64, 2, 2, 128))
    sage_kernels.sage_attention(q, k, v, state=state.head_state(1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        state.advance(*levels)
        torch.cuda.synchronize()
    launches = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    assert 1 <= len(launches) <= 6, [event.name for event in launches]
    assert (state._shared.plan_scale[3:5] > 0).all()


@pytest.mark.gpu
def test_plan_step_is_opaque_to_compile():
    state = ScaleState(SITES, device="cuda")
    bins = torch.zeros(1, dtype=torch.int64, device="cuda")
    tensors, numbers = state._launch_tensors(bins, bins + 1), state._launch_numbers()

    def advance():
        plan_step(*tensors, **numbers)

    record(state, torch.Generator().manual_seed(1))
    state._run.add_(1)
    torch.compile(advance, fullgraph=True)()
    assert (state._shared.plan_scale > 0).any()
