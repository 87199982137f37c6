"""Random actions of users between captured forwards, beside a copy of the model that runs eagerly: the same bits."""

from __future__ import annotations

import collections
import contextlib
import random

import diffusers
import pytest
import torch

import sage_processors as sp
from tests.support.cpu_graphs import captures, options
from tests.support.tiny_models import MODELS


NAMES = ["flux", "qwen_image_padded", "chroma", "unet_sd15", "mochi"]
FORWARDS = 100  # of each model on a GPU, in all 500


class Pair:
    """A model with graphs and its copy without, to which everything is done alike."""

    def __init__(self, name, device, seed):
        self.random, self.device = random.Random(seed), device
        self.models = [MODELS[name]()[0].to(device, torch.bfloat16) for _ in range(2)]
        inputs = MODELS[name]()[1]
        inputs["timestep"] = torch.as_tensor(inputs["timestep"], dtype=torch.float32).reshape(1)
        self.inputs = {n: moved(x, device) for n, x in inputs.items()}
        self.first = dict(self.inputs)
        self.options = {"scaling": self.random.choice(["timestep", "dynamic"])}
        if self.random.random() < 0.5:
            self.options["linears"] = {"format": "int8", "min_features": 0}
        self.handles, self.hooks, self.cached, self.is_twice = [], [], False, False
        self.swap()

    def swap(self):
        for handle in self.handles:
            handle.remove()
        self.handles = [sp.apply(model, options(**self.options)) for model in self.models]
        if self.device.type == "cuda":
            denoiser = self.handles[0]._denoisers[0]
            denoiser.use_graphs(sp.diffusion.graphs.model_graphs.ModelGraphs(self.handles[0], denoiser))
        else:
            captures(self.handles[0])
        for handle in self.handles:
            handle.new_run()
        swap = self.handles[1]._denoisers[0].linears
        if swap is not None:
            swap.run_short_calls(True)  # as graphs do

    @property
    def graphs(self):
        return self.handles[0]._denoisers[0].graphs

    def each(self, change):
        for model in self.models:
            change(model)

    def weights(self, change):
        place = self.random.randrange(1000)
        with torch.no_grad():
            for model in self.models:
                large = [x for x in model.parameters() if x.dim() == 2]
                change(large[place % len(large)])

    def act(self):
        """Do one random thing, mostly nothing."""
        if self.random.random() < 0.12:
            getattr(self, self.random.choice(ACTIONS))()

    def weight_in_place(self):
        self.weights(lambda x: x.mul_(1.1))

    def weight_exchanged(self):
        self.weights(lambda x: setattr(x, "data", x.data.clone() * 0.9))

    def weights_loaded(self):
        self.each(lambda model: model.load_state_dict({n: x * 0.99 for n, x in model.state_dict().items()}))

    def new_run(self):
        for handle in self.handles:
            handle.new_run()

    def refresh(self):
        for handle in self.handles:
            handle.refresh()

    def other_options(self):
        self.options["scaling"] = self.random.choice(["timestep", "dynamic"])
        self.swap()

    def batch(self):
        """Two samples instead of one, or one again."""
        self.is_twice = not self.is_twice
        self.inputs = {n: twice(n, x) if self.is_twice else x for n, x in self.first.items()}

    def text(self):
        """A text of another length, or a hole in it, written over the one before or in a new tensor."""
        mask = self.inputs.get("encoder_attention_mask")
        if mask is None:
            return
        other = torch.arange(mask.shape[1], device=self.device) < self.random.choice([5, 13])
        other[self.random.randrange(5)] = self.random.random() < 0.5
        if self.random.random() < 0.5:
            mask.copy_(other.expand_as(mask))
        else:
            self.inputs["encoder_attention_mask"] = other.expand_as(mask).clone()

    def hook(self):
        """A user's hook outside of the blocks, or away with it."""
        if self.hooks:
            [hook.remove() for hook in self.hooks]
            self.hooks = []
        else:
            self.hooks = [last_layer(model).register_forward_hook(halved) for model in self.models]

    def cache(self):
        """FirstBlockCache on or off."""
        if not isinstance(self.models[0], diffusers.FluxTransformer2DModel):
            return  # of these models only FLUX has blocks enough that the cache knows
        config = diffusers.FirstBlockCacheConfig(threshold=0.02)
        self.each(lambda model: model.disable_cache() if self.cached else model.enable_cache(config))
        self.cached = not self.cached

    def flag(self):
        self.each(lambda model: setattr(norm_of(model), "eps", norm_of(model).eps * 2))

    def moved_away(self):
        self.each(lambda model: model.to("cpu"))
        self.each(lambda model: model.to(self.device))

    def forward(self, step):
        """Call both models alike, one after the other. Returns their results."""
        scale = 1 - step / 60
        given = {n: x * scale if n in ("hidden_states", "sample", "timestep") else x for n, x in self.inputs.items()}
        how = self.random.choice(["no_grad"] * 20 + ["inference_mode"] * 8 + ["autocast", "grad"])
        modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}
        found = []
        for model in self.models:
            with modes.get(how, torch.no_grad)():
                cache = model.cache_context("cond") if self.cached else contextlib.nullcontext()
                with cache, torch.autocast(self.device.type, torch.bfloat16, enabled=how == "autocast"):
                    found.append(model(**given, return_dict=False)[0].detach())
        return how, found


ACTIONS = [
    "weight_in_place", "weight_exchanged", "weights_loaded", "new_run", "refresh", "other_options", "batch", "hook",
    "cache", "flag", "moved_away", "text",
]  # fmt: skip


def moved(x, device):
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(device, torch.bfloat16) if x.is_floating_point() and x.dim() > 1 else x.to(device)


def twice(name, x):
    if not isinstance(x, torch.Tensor) or name.endswith("ids"):
        return x * 2 if name == "img_shapes" else x
    return x.repeat(2, *[1] * (x.dim() - 1))


def last_layer(model):
    return model.conv_out if hasattr(model, "conv_out") else model.proj_out


def norm_of(model):
    return next(module for module in model.modules() if isinstance(getattr(module, "eps", None), float))


def halved(module, args, out):
    return out * 0.5


def fuzz(name, device, forwards):
    pair = Pair(name, device, seed=NAMES.index(name))
    replays, reasons = 0, collections.Counter()
    with torch.no_grad():
        for step in range(forwards):
            pair.act()
            graphs = pair.graphs
            before = graphs.replays + graphs.partly, graphs.eager + graphs.block_eager
            how, (found, wanted) = pair.forward(step % 50)
            assert torch.equal(found, wanted), (step, how, graphs.eager, graphs.block_eager)
            replays += graphs.replays + graphs.partly - before[0]
            reasons += graphs.eager + graphs.block_eager - before[1]
            assert not graphs.differing
    [handle.remove() for handle in pair.handles]
    assert replays > forwards // 8, reasons
    assert torch.rand(2, device=device).isfinite().all()


@pytest.mark.parametrize("name", ["flux", "mochi"])
def test_random_actions_between_forwards(name):
    fuzz(name, torch.device("cpu"), 40)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_random_actions_between_forwards_on_a_gpu(name):
    fuzz(name, torch.device("cuda", 0), FORWARDS)
