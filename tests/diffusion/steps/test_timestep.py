"""Noise levels against the schedulers' own noising, and a scheduler that is followed without being changed."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref

import diffusers
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sage_processors.diffusion.steps.noise_level import noise_levels, track, untrack


FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
ZERO_SNR = {"beta_schedule": "scaled_linear", "timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
KARRAS = {"use_karras_sigmas": True}
SCHEDULERS = {
    "flow_euler": ("FlowMatchEulerDiscreteScheduler", {}), "ddim": ("DDIMScheduler", {}),
    "flow_euler_shift3": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}), "deis": ("DEISMultistepScheduler", {}),
    "flow_euler_karras": ("FlowMatchEulerDiscreteScheduler", KARRAS), "ddpm": ("DDPMScheduler", {}),
    "flow_euler_inverted": ("FlowMatchEulerDiscreteScheduler", {"invert_sigmas": True}),
    "flow_heun": ("FlowMatchHeunDiscreteScheduler", {}), "flow_lcm": ("FlowMatchLCMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}), "lcm": ("LCMScheduler", {}), "tcd": ("TCDScheduler", {}),
    "cogvideox_ddim": ("CogVideoXDDIMScheduler", {}), "euler": ("EulerDiscreteScheduler", {}),
    "euler_karras": ("EulerDiscreteScheduler", KARRAS), "euler_ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}), "kdpm2": ("KDPM2DiscreteScheduler", {}),
    "dpm_multistep": ("DPMSolverMultistepScheduler", {}), "dpm_singlestep": ("DPMSolverSinglestepScheduler", {}),
    "dpm_multistep_karras": ("DPMSolverMultistepScheduler", KARRAS), "sasolver": ("SASolverScheduler", {}),
    "dpm_multistep_flow": ("DPMSolverMultistepScheduler", FLOW), "unipc": ("UniPCMultistepScheduler", {}),
    "unipc_flow": ("UniPCMultistepScheduler", FLOW | {"flow_shift": 3.0}), "ddim_scaled": ("DDIMScheduler", ZERO_SNR),
    "edm_euler": ("EDMEulerScheduler", {}), "edm_dpm": ("EDMDPMSolverMultistepScheduler", {}),
}  # fmt: skip


def make(name):
    class_name, config = SCHEDULERS[name]
    return getattr(diffusers, class_name)(**config)


class Listener:
    """Remembers what a run tells it, as floats."""

    def __init__(self):
        self.events = []

    def begin_run(self, u):
        self.events.append(("begin", float(u)))

    def advance(self, finished, following):
        self.events.append((float(finished), float(following)))


class NoHostRead(TorchDispatchMode):
    """Fails where a tensor is read on the host: on a GPU it would wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read on the host"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"kdpm2"}))
def test_noise_levels_match_the_noising_of_the_scheduler(name):
    scheduler = make(name)
    scheduler.set_timesteps(10)
    levels = noise_levels(scheduler).double()
    assert levels.shape == scheduler.timesteps.shape
    noise = getattr(scheduler, "add_noise", None)
    one, zero = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    data = one * getattr(scheduler.config, "sigma_data", 1.0)  # EDM assumes clean data of this standard deviation
    for level, t in zip(levels, scheduler.timesteps, strict=True):
        if noise is not None:
            alpha, sigma = noise(data, zero, t[None]), noise(zero, one, t[None])
        else:
            scheduler._step_index = None  # FlowMatchHeun noises at the index it is at
            alpha = scheduler.scale_noise(one, t[None], zero)
            scheduler._step_index = None
            sigma = scheduler.scale_noise(zero, t[None], one)
        if getattr(scheduler.config, "invert_sigmas", False):
            alpha, sigma = sigma, alpha  # scale_noise of diffusers takes the inverted sigma for the noise
        expected = float(sigma / (alpha**2 + sigma**2).sqrt())
        assert float(level) == pytest.approx(expected, abs=1e-4)
    assert (levels.diff() <= 1e-6).all()
    assert levels[0] > 0.9 and levels[-1] < 0.8


def test_noise_levels_of_kdpm2_alternate_between_its_two_sigmas():
    scheduler = make("kdpm2")
    scheduler.set_timesteps(10)
    sigmas = torch.stack([scheduler.sigmas, scheduler.sigmas_interpol])[:, : len(scheduler.timesteps)]
    sigmas = torch.where(torch.arange(sigmas.shape[1]) % 2 == 0, sigmas[0], sigmas[1])
    torch.testing.assert_close(noise_levels(scheduler), sigmas / (1 + sigmas**2).sqrt(), atol=2e-3, rtol=0)


def test_noise_levels_of_an_unknown_scheduler_fall_with_its_place_in_the_run():
    scheduler = diffusers.DDPMWuerstchenScheduler()
    scheduler.set_timesteps(4)
    assert noise_levels(scheduler).tolist() == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_noise_levels_of_trigflow_are_sines():
    """x_t = cos(t) · x0 + sin(t) · ε: SANA-Sprint."""
    scheduler = diffusers.SCMScheduler()
    scheduler.set_timesteps(2)
    torch.testing.assert_close(noise_levels(scheduler), scheduler.timesteps.sin().float())
    assert noise_levels(scheduler)[0] > 0.99


def run_all(scheduler, timesteps=None, as_number=False):
    sample = torch.zeros(1, 1, 2, 2)
    for t in scheduler.timesteps if timesteps is None else timesteps:
        scheduler.step(torch.zeros_like(sample), t.item() if as_number else t, sample)


@pytest.mark.parametrize(
    "name",
    ["flow_euler_shift3", "ddim", "pndm", "euler", "heun", "flow_heun", "dpm_multistep", "unipc_flow", "edm_euler"],
)
def test_tracked_run_visits_the_levels_in_order(name):
    scheduler, listener = make(name), Listener()
    track(scheduler, listener)
    listener.events.clear()
    scheduler.set_timesteps(6)
    levels = noise_levels(scheduler).tolist()
    for _ in range(2):  # a second run begins anew
        listener.events.clear()
        scheduler.set_timesteps(6)
        run_all(scheduler)
        expected = [("begin", levels[0])] + list(zip(levels, levels[1:] + levels[-1:], strict=True))
        assert events_close(listener.events, expected)


def events_close(events, expected):
    assert len(events) == len(expected), (events, expected)
    for got, want in zip(events, expected, strict=True):
        assert (got[0] == want[0]) if isinstance(want[0], str) else got[0] == pytest.approx(want[0], abs=1e-6), (
            events,
            expected,
        )
        assert got[1] == pytest.approx(want[1], abs=1e-6), (events, expected)
    return True


def test_tracked_run_that_starts_in_the_middle():
    scheduler, listener = make("flow_euler"), Listener()
    track(scheduler, listener)
    scheduler.set_timesteps(8)
    levels = noise_levels(scheduler).tolist()
    listener.events.clear()
    scheduler.set_begin_index(3)  # image to image
    run_all(scheduler, scheduler.timesteps[3:])
    expected = [("begin", levels[3])] + list(zip(levels[3:], levels[4:] + levels[-1:], strict=True))
    assert events_close(listener.events, expected)

    scheduler, listener = make("ddim"), Listener()  # has no begin index: the timesteps tell
    track(scheduler, listener)
    scheduler.set_timesteps(8)
    levels = noise_levels(scheduler).tolist()
    listener.events.clear()
    run_all(scheduler, scheduler.timesteps[5:], as_number=True)
    assert events_close(listener.events, list(zip(levels[5:], levels[6:] + levels[-1:], strict=True)))


def test_timesteps_that_were_not_there_when_the_scheduler_was_followed():
    scheduler, listener = make("flow_euler"), Listener()
    scheduler.set_timesteps(4)
    timesteps = scheduler.timesteps
    for missing in (timesteps[:0], None):
        scheduler.timesteps = missing
        run = track(scheduler, listener)
        run.finish_step(timesteps[1])
        assert listener.events == [] and run.level is None
    scheduler.timesteps = timesteps
    levels = noise_levels(scheduler).tolist()
    run.finish_step(timesteps[1])
    assert events_close(listener.events, [("begin", levels[0]), (levels[1], levels[2])])


def test_a_scheduler_whose_step_has_no_timestep_runs_and_tells_nothing():
    class Steps:
        def __init__(self):
            self.timesteps, self.taken = torch.linspace(1, 0.2, 5), 0

        def set_timesteps(self, number):
            self.timesteps = torch.linspace(1, 0.2, number)

        def step(self, output, sample=None):
            self.taken += 1

    scheduler, listener = Steps(), Listener()
    track(scheduler, listener)
    listener.events.clear()
    scheduler.step(1.0)
    scheduler.step(1.0, sample=2.0)
    assert scheduler.taken == 2 and listener.events == []


def test_a_run_goes_to_the_device_of_its_timesteps():
    """The other way round would wait for that device. ("meta" has no values, so none can have been read.)"""
    scheduler = make("ddim")
    scheduler.set_timesteps(5)
    told = []
    listener = type("Told", (), {"begin_run": lambda *_: None, "advance": lambda _, *levels: told.append(levels)})()
    run = track(scheduler, listener)
    for _ in range(2):
        run.finish_step(scheduler.timesteps[0].to("meta"))
    run.finish_step(scheduler.timesteps[1])  # a number for the device, wherever it is
    assert [x.device.type for levels in told for x in (*levels, run.level)] == ["meta"] * 9


def test_tracked_step_with_a_timestep_per_token_takes_the_noisiest():
    scheduler, listener = make("flow_euler"), Listener()
    run = track(scheduler, listener)
    scheduler.set_timesteps(8)
    listener.events.clear()
    run.finish_step(torch.empty(0))  # of no token at all
    assert listener.events == []
    run.finish_step(torch.stack([scheduler.timesteps[6], scheduler.timesteps[2]]))
    assert listener.events[0][0] == pytest.approx(float(noise_levels(scheduler)[2]))


@pytest.mark.parametrize("as_given", [int, torch.tensor, lambda t: torch.tensor([float(t)])])
def test_Q04_a_step_that_the_scheduler_did_not_plan_is_the_nearest_one(as_given):
    for timestep, place in ((1500, 0), (-3, 4), (590, 2), (490, 2)):
        scheduler, listener = diffusers.DDIMScheduler(timestep_spacing="linspace"), Listener()
        run = track(scheduler, listener)
        scheduler.set_timesteps(5)  # 999, 749, 500, 250, 0
        run.finish_step(as_given(timestep))
        levels = noise_levels(scheduler).tolist()
        assert events_close(listener.events[-1:], [(levels[place], levels[min(place + 1, 4)])])


@pytest.mark.parametrize("name", ["flow_euler", "heun", "ddim"])
def test_tracked_run_never_reads_a_tensor_on_the_host(name):
    scheduler = make(name)
    scheduler.set_timesteps(6)
    run = track(scheduler, type("Silent", (), {"begin_run": lambda *a: None, "advance": lambda *a: None})())
    with NoHostRead():
        run.start()
        for t in scheduler.timesteps:
            run.finish_step(t)
    with pytest.raises(AssertionError, match="read on the host"), NoHostRead():
        float(scheduler.timesteps[0])


@pytest.mark.parametrize("name", ["flow_euler", "ddim", "heun", "dpm_multistep", "unipc"])
def test_tracking_does_not_change_the_scheduler(name, tmp_path):
    stock, tracked = make(name), make(name)
    base = type(tracked)
    track(tracked, Listener())
    assert isinstance(tracked, base) and type(tracked).__name__ == base.__name__
    for method in ("set_timesteps", "step"):
        assert inspect.signature(getattr(tracked, method)) == inspect.signature(getattr(stock, method))
    sample = torch.randn(1, 1, 4, 4)
    results = []
    for scheduler in (stock, tracked):
        scheduler.set_timesteps(5)
        x = sample
        for t in scheduler.timesteps:
            x = scheduler.step(
                scheduler.scale_model_input(x, t) * 0.3 if hasattr(scheduler, "scale_model_input") else x, t, x
            ).prev_sample
        results.append(x)
    assert torch.equal(*results)

    stock.save_pretrained(tmp_path / "stock"), tracked.save_pretrained(tmp_path / "tracked")
    files = [(tmp_path / kind / "scheduler_config.json").read_text() for kind in ("stock", "tracked")]
    assert files[0] == files[1]
    assert type(base.from_pretrained(tmp_path / "tracked")) is base
    assert isinstance(type(tracked).from_config(tracked.config), base)
    untrack(tracked, None)  # somebody else's
    assert type(tracked) is not base


def test_copies_of_a_tracked_scheduler_are_plain_and_silent():
    scheduler, listener = make("flow_euler"), Listener()
    track(scheduler, listener)
    scheduler.set_timesteps(4)
    events = list(listener.events)
    for other in (copy.deepcopy(scheduler), copy.copy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert type(other) is diffusers.FlowMatchEulerDiscreteScheduler
        run_all(other)
        other.set_timesteps(3)
    assert listener.events == events
    run_all(scheduler)
    assert len(listener.events) == len(events) + 4


def test_two_listeners_share_a_scheduler_and_the_last_one_gives_the_class_back():
    scheduler, first, second = make("ddim"), Listener(), Listener()
    scheduler.set_timesteps(4)
    track(scheduler, first)
    assert first.events and first.events[0][0] == "begin"  # a run that was already prepared is told at once
    track(scheduler, second)
    track(scheduler, second)
    first.events.clear(), second.events.clear()
    run_all(scheduler)
    assert len(first.events) == len(second.events) == 4 and first.events == second.events
    untrack(scheduler, first)
    run_all(scheduler)
    assert len(first.events) == 4 and len(second.events) == 8
    untrack(scheduler, second)
    assert type(scheduler) is diffusers.DDIMScheduler and "_sage" not in vars(scheduler)


def test_a_tracked_scheduler_can_be_collected():
    scheduler = make("ddim")
    track(scheduler, Listener())
    gone = weakref.ref(scheduler)
    del scheduler
    gc.collect()
    assert gone() is None


# --- P32: timesteps and sigmas that are no numbers ---


def test_P32_noise_levels_of_timesteps_and_sigmas_that_are_no_numbers_are_pure_noise():
    scheduler = make("ddim")
    scheduler.set_timesteps(5)
    good = noise_levels(scheduler)
    scheduler.timesteps = scheduler.timesteps.float()
    scheduler.timesteps[1] = torch.nan
    assert torch.equal(noise_levels(scheduler), torch.where(torch.arange(5) == 1, 1.0, good))
    for name in ("euler", "flow_euler"):
        scheduler = make(name)
        scheduler.set_timesteps(5)
        good = noise_levels(scheduler)
        scheduler.sigmas[0], scheduler.sigmas[2] = torch.inf, torch.nan
        changed = (torch.arange(5) == 0) | (torch.arange(5) == 2)
        assert torch.equal(noise_levels(scheduler), torch.where(changed, 1.0, good))


@pytest.mark.parametrize("name", ["flow_euler", "ddim"])
@pytest.mark.parametrize("kind", ["number", "tensor"])
def test_P32_a_step_from_a_timestep_that_is_none_goes_on_where_the_run_is(name, kind):
    scheduler, listener = make(name), Listener()
    run = track(scheduler, listener)
    scheduler.set_timesteps(5)
    levels = noise_levels(scheduler).tolist()
    listener.events.clear()
    for i, t in enumerate(scheduler.timesteps):
        t = torch.full_like(t, torch.nan, dtype=torch.float32) if i in (1, 2) else t
        run.finish_step(t.item() if kind == "number" else t)
    assert events_close(listener.events, list(zip(levels, levels[1:] + levels[-1:], strict=True)))
