"""Random lives of a model: what users do to one between two forwards, done alike to several copies of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Own(nn.Module):
    """A user's module around a library's: keeps what goes in and out, and writes to it behind PyTorch's back."""

    def __init__(self, inner: nn.Module, kept: list[torch.Tensor]):
        super().__init__()
        self.inner, self.kept = inner, kept

    def __deepcopy__(self, memo):
        return Own(copy.deepcopy(self.inner, memo), [])

    def forward(self, *args, **kwargs):
        output = self.inner(*args, **kwargs)
        if type(output) is torch.Tensor or isinstance(output, torch.Tensor):
            self.kept.append(output)
            output.data.mul_(1.1)
        return output


class Life:
    """One copy of a model: its hooks, what they kept, and what was put into it."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.handles: dict[str, Any] = {}
        self.kept: list[torch.Tensor] = []

    def module(self, name: str) -> Any:
        return self.model.get_submodule(name)


def _hook(life: Life, name: str) -> None:
    def keep(module, args, output):
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            life.kept.append(first)

    _unhook(life, name)
    life.handles[name] = life.module(name).register_forward_hook(keep)


def _writing_hook(life: Life, name: str) -> None:
    _unhook(life, name)

    def halve(module, args):
        if args and isinstance(args[0], torch.Tensor):
            args[0].data.mul_(0.9)

    life.handles[name] = life.module(name).register_forward_pre_hook(halve)


def _unhook(life: Life, name: str) -> None:
    if name in life.handles:
        life.handles.pop(name).remove()


def _unhook_all(life: Life, name: str) -> None:
    for each in list(life.handles):
        _unhook(life, each)


def _wrap(life: Life, name: str) -> None:
    if not isinstance(life.module(name), Own):
        life.model.set_submodule(name, Own(life.module(name), life.kept))


def _unwrap(life: Life, name: str) -> None:
    for each, module in list(life.model.named_modules()):
        if isinstance(module, Own):
            life.model.set_submodule(each, module.inner)


def _forward(life: Life, name: str) -> None:
    """A function put on a module, as profilers do."""
    module = life.module(name)
    if "forward" not in module.__dict__:
        own = module.forward
        module.forward = lambda *args, **kwargs: own(*args, **kwargs)


def _own_forward(life: Life, name: str) -> None:
    for module in life.model.modules():
        if getattr(module.__dict__.get("forward"), "__name__", "") == "<lambda>":
            del module.forward


def _write(life: Life, name: str) -> None:
    for parameter in life.module(name).parameters():
        parameter.mul_(1.01)


def _write_data(life: Life, name: str) -> None:
    for module in life.module(name).modules():
        for key in ("weight", "bias"):
            if isinstance(module, nn.Linear) and getattr(module, key, None) is not None:
                getattr(module, key).data.mul_(1.02)


def _exchange(life: Life, name: str) -> None:
    for module in life.module(name).modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach() * 0.98, requires_grad=False)


def _load(life: Life, name: str) -> None:
    module = life.module(name)
    module.load_state_dict({key: value * 1.01 for key, value in module.state_dict().items()})


def _nothing(life: Life, name: str) -> None:
    """The forward that follows is one more alike."""


ACTIONS: dict[str, Callable[[Life, str], None]] = {
    "hook": _hook,
    "writing hook": _writing_hook,
    "unhook": _unhook_all,
    "wrap": _wrap,
    "unwrap": _unwrap,
    "forward": _forward,
    "own forward": _own_forward,
    "write": _write,
    "write data": _write_data,
    "exchange": _exchange,
    "load": _load,
    "nothing": _nothing,
}


def random_life(seed: int, names: list[str], length: int = 8) -> list[tuple[str, str]]:
    """[(action, name of a module)]: most of them at modules inside of blocks."""
    rng = random.Random(seed)
    return [(rng.choice(tuple(ACTIONS)), rng.choice(names)) for _ in range(length)]
