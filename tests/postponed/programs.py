"""Random programs over norms and linear layers, as users write them: in place, and behind PyTorch's back.

A program is a list of steps on a list of tensors [B, S, WIDTH]. The same program runs on a stock model and on a
swapped copy of it, so that whatever it does to tensors and weights it does to both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


WIDTH = 32
VECTORS = {
    "vector": lambda b: torch.linspace(0.5, 1.5, WIDTH),
    "by sample": lambda b: torch.linspace(0.5, 1.5, b * WIDTH).view(b, 1, WIDTH),
    "bool": lambda b: torch.arange(WIDTH) % 3 > 0,
    "int": lambda b: torch.arange(WIDTH) % 3,
    "fp64": lambda b: torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64),
}


def layers() -> nn.ModuleDict:
    """Norms and linear layers that keep the width, and two that double it for gates."""
    torch.manual_seed(0)
    made = {
        "layer_norm": nn.LayerNorm(WIDTH),
        "plain_norm": nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6),
        "rms_norm": nn.RMSNorm(WIDTH, eps=1e-6),
        **{name: nn.Linear(WIDTH, WIDTH) for name in ("to_q", "to_k", "to_v", "up_proj", "gate_proj", "out")},
        "wide": nn.Linear(WIDTH, 2 * WIDTH),
    }
    for module in made.values():
        for parameter in module.parameters():
            nn.init.normal_(parameter, 0.3 if parameter.dim() == 1 else 0.0, 0.3)
    return nn.ModuleDict(made).eval().requires_grad_(False)


NORMS = ("layer_norm", "plain_norm", "rms_norm")
LINEARS = ("to_q", "to_k", "to_v", "up_proj", "gate_proj", "out")
Step = tuple[str, tuple[Any, ...]]


class Program(nn.Module):
    """Runs the steps; returns all tensors that it holds at the end, hooks' included."""

    def __init__(self, steps: list[Step]):
        super().__init__()
        self.layers, self.steps = layers(), steps

    def forward(self, x):
        held, kept = [x], []
        for name, args in self.steps:
            STEPS[name](self.layers, held, kept, *args)
        return [value + 0 for value in held], [value + 0 for value in kept]


def _put(step: Callable[..., Any]) -> Callable[..., None]:
    """A step that computes a new tensor."""

    def run(layers, held, kept, *args):
        held.append(step(layers, held, *args))

    return run


def _numpy(layers, held, kept, i):
    if not held[i].requires_grad:
        held[i].detach().numpy()[:, 0] *= 2


def _hooked(layers, held, kept, name, i):
    """A user's hook keeps what a module gives, and writes to it."""

    def keep(module, args, output):
        kept.append(output)
        return output.mul_(1.5)

    handle = layers[name].register_forward_hook(keep)
    held.append(layers[name](held[i]))
    handle.remove()


def _pre_hooked(layers, held, kept, name, i):
    handle = layers[name].register_forward_pre_hook(lambda module, args: args[0].data.mul_(0.5) and None)
    held.append(layers[name](held[i].clone()))
    handle.remove()


def _chunk(layers, held, kept, i, activation, order):
    halves = layers["wide"](held[i]).chunk(2, -1)
    held.append(ACTIVATIONS[activation](halves[order]))
    held += halves


def _columns(layers, held, kept, i, j):
    held.append(torch.cat([held[i], held[j]], -1)[..., WIDTH // 2 : -WIDTH // 2])


def _dlpack(layers, held, i):
    return torch.utils.dlpack.from_dlpack(held[i].contiguous().detach())


ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "tanh": lambda x: F.gelu(x, approximate="tanh")}
STEPS: dict[str, Callable[..., None]] = {
    # computing
    "norm": _put(lambda layers, held, name, i: layers[name](held[i])),
    "linear": _put(lambda layers, held, name, i: layers[name](held[i])),
    "activation": _put(lambda layers, held, name, i: ACTIVATIONS[name](held[i])),
    "times": _put(lambda layers, held, name, i: held[i] * VECTORS[name](len(held[i])).to(held[i].device)),
    "plus": _put(lambda layers, held, name, i: VECTORS[name](len(held[i])) + held[i]),
    "product": _put(lambda layers, held, i, j: held[i] * held[j]),
    "sum": _put(lambda layers, held, i, j: held[i] + held[j]),
    "over one": _put(lambda layers, held, i: held[i] / 1.0),
    "dropout": _put(lambda layers, held, i: F.dropout(held[i], 0.5, False)),
    "contiguous": _put(lambda layers, held, i: held[i].contiguous()),
    "flat": _put(lambda layers, held, i: held[i].contiguous().view(-1).view(held[i].shape)),
    "transposed": _put(lambda layers, held, i: held[i].mT.contiguous().mT),
    "part": _put(lambda layers, held, i: held[i][:, :1].expand_as(held[i]).contiguous()),
    "float": _put(lambda layers, held, i: held[i].double().float()),
    "real": _put(lambda layers, held, i: held[i].real),
    "subclass": _put(lambda layers, held, i: held[i].as_subclass(torch.Tensor)),
    "parameter": _put(lambda layers, held, i: nn.Parameter(held[i], requires_grad=False).data),
    "dlpack": _put(_dlpack),
    "chunk": _chunk,
    "columns": _columns,
    # writing
    "mul_": lambda layers, held, kept, i: held[i].mul_(1.5),
    "iadd": lambda layers, held, kept, i: held[i].__iadd__(0.25),
    "fill part": lambda layers, held, kept, i: held[i][:, 0].fill_(0.5),
    "add_ to": lambda layers, held, kept, i, j: held[i].add_(held[j].clone(), alpha=0.5),
    "data.mul_": lambda layers, held, kept, i: held[i].data.mul_(0.75),
    "numpy": _numpy,
    "weight": lambda layers, held, kept, name: layers[name].weight.mul_(1.25),
    "bias": lambda layers, held, kept, name: layers[name].bias.add_(0.5),
    # other people's code
    "hook": _hooked,
    "pre-hook": _pre_hooked,
}
LIBRARY = tuple(
    name for name in STEPS if name not in ("data.mul_", "numpy", "hook", "pre-hook", "parameter", "dlpack")
)


USUAL = ("norm", "norm", "linear", "linear", "linear", "times", "plus", "activation", "product", "sum", "chunk")
WRITES = ("mul_", "iadd", "fill part", "add_ to", "data.mul_", "numpy", "weight", "bias")


def random_program(seed: int, names=tuple(STEPS), length: int = 9) -> list[Step]:
    """The program of this seed: half of its steps are those that kernels do along with others, a third write."""
    rng = random.Random(seed)
    steps: list[Step] = []
    count = 1  # tensors that are held

    def at():
        return count - 1 if rng.random() < 0.5 else rng.randrange(max(0, count - 4), count)

    def arguments(name):
        if name == "norm":
            return rng.choice(NORMS), at()
        if name in ("hook", "pre-hook"):
            return rng.choice(LINEARS + NORMS), at()
        if name == "linear":
            return rng.choice(LINEARS), at()
        if name == "activation":
            return rng.choice(tuple(ACTIVATIONS)), at()
        if name in ("times", "plus"):
            return rng.choice(tuple(VECTORS)), at()
        if name in ("product", "sum", "columns", "add_ to"):
            return at(), at()
        if name == "chunk":
            return at(), rng.choice(tuple(ACTIVATIONS)), rng.randrange(2)
        if name in ("weight", "bias"):
            return (rng.choice(LINEARS if name == "bias" else (*LINEARS, "layer_norm", "rms_norm")),)
        return (at(),)

    others = tuple(name for name in names if name not in (*USUAL, *WRITES))
    writes = tuple(name for name in names if name in WRITES)
    for _ in range(length):
        name = rng.choice(rng.choices((USUAL, writes, others), (5, 3, 2))[0])
        steps.append((name, arguments(name)))
        count += {"chunk": 3}.get(name, name not in WRITES)
    return steps
