"""The balance of channels: outliers of an activation go into the weights behind it, before either is rounded.

What an activation will hold is not known when its layers are swapped, their weights are. A channel with outliers has
small columns in all layers that read it (LayerNorm's gain and training see to that; planted pairs are inverses): so
columns far below the others are raised to them, and the activation's channel is divided by as much. Nothing else is
balanced: an ordinary layer has no balance and costs nothing.
Factors are powers of two, so that neither side is rounded by them; any balance gives the same product.
"""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels.compat import mark_static_address

from .weights.layers import repeated_blocks
from .weights.linear_state import AT_REST, DTYPES


# A column is far below the others where it has a quarter of their norm or less. In a balanced channel the rounding of
# the activation counts as in all others, at most 1.5 bits of it for nothing where the channel has no outliers; of at
# most an eighth of the channels that is less than what a wider row would cost in all of them.
OFF = 2.0  # in powers of two
MAX_SHARE = 1 / 8
MOST = 24.0


class Balance:
    """What the layers that read one activation have in common.

    Attributes: vector: fp32 [K], powers of two up to 1; `quantize_activation` multiplies by it, and `quantize_weight`
        divides by it.
    """

    def __init__(self, vector: torch.Tensor):
        self.vector = vector
        mark_static_address(vector, guard=False)

    def on(self, device: torch.device) -> torch.Tensor:
        """The vector where a call is."""
        if self.vector.device != device:
            with torch.inference_mode(False), torch.no_grad():
                self.vector = self.vector.to(device)
            mark_static_address(self.vector, guard=False)
        return self.vector


def vector_of(state, device: torch.device) -> torch.Tensor | None:
    """The balance [K] of a swapped layer, or None."""
    return None if state.balance is None else state.balance.on(device)


def column_sizes(weight: torch.Tensor) -> torch.Tensor | None:
    """log2 of the norm of every column of a weight [N, K] over that of the median one, fp32 on a CPU.

    None for a weight that is not finite or mostly zero: it says nothing.
    """
    norms = weight.detach().float().square().sum(0).sqrt().cpu()
    middle = norms.median()
    if not (norms.isfinite().all() and middle > 0):
        return None
    return (norms / middle).log2().clamp_min(-MOST)


def exponents_of(sizes: list[torch.Tensor]) -> torch.Tensor:
    """Powers of two [K], 0 or less, that the columns of weights of these sizes are divided by."""
    size = torch.stack(sizes).mean(0)
    far = size <= -OFF
    if far.sum() > MAX_SHARE * len(size):  # so many are no outliers
        far[:] = False
    return torch.where(far, size.round(), torch.zeros_like(size))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether columns that are far below the others in one weight are so in both, within a factor of two."""
    far = (a <= -OFF) | (b <= -OFF)
    return bool(((a - b)[far].abs() <= 1).all())


class Neighbours:
    """Linear layers of one block with as many input channels: those with the same outliers read one activation.

    Whether a layer has a balance is decided once, before it is first quantised, and later its factors alone may
    change: graphs that were captured read the vector, or do not.

    Attributes: units: lists of layers that are known to read one activation.
    """

    def __init__(self, units: list[list[Any]]):
        self.units = units
        self._is_open = True  # nothing is decided yet

    def _members(self, unit: list[Any]) -> list[Any]:
        """Those that were not given back meanwhile."""
        return [x for x in unit if "_sage_linear" in x.__dict__ and x._sage_linear.neighbours is self]

    def decide(self, module: Any) -> None:
        """Give a layer its balance; all of its neighbours too where all weights are on hand, else it is alone."""
        state = module._sage_linear
        if state.is_balanced:
            return
        modules = [x for unit in self.units for x in self._members(unit)]
        with torch.inference_mode(False), torch.no_grad():
            weights = [weight_on_hand(x) for x in modules]
            if self._is_open and all(weight is not None for weight in weights):
                self._decide_all()
            else:
                _give([module], [_size_of(module)])
        self._is_open = False

    def _decide_all(self) -> None:
        found: list[tuple[list[Any], list[Any]]] = []  # modules, sizes of their columns
        for unit in map(self._members, self.units):
            own: list[tuple[list[Any], list[Any]]] = []
            for module in unit:
                _join(own, [module], [_size_of(module)], even_ordinary=True)
            for modules, sizes in own:
                _join(found, modules, sizes, even_ordinary=False)
        for modules, sizes in found:
            _give(modules, sizes)

    def read_anew(self, module: Any) -> None:
        """Follow a weight that has changed: the factors of all layers that share its balance, and their codes.

        Between calls only. Where a weight is not on hand all stays as it is, which is right, if not as good.
        """
        balance = module._sage_linear.balance
        if balance is None:
            return
        modules = [x for unit in self.units for x in self._members(unit) if x._sage_linear.balance is balance]
        weights = [weight_on_hand(x) for x in modules]
        if any(weight is None for weight in weights):
            return
        with torch.inference_mode(False), torch.no_grad():
            sizes = [size for size in map(_size_of, modules) if size is not None]
            if not sizes:
                return
            vector = torch.exp2(exponents_of(sizes))
            if torch.equal(vector, balance.vector.cpu()):
                return
            made = [x._sage_linear.rows_from(_near(w), vector) for x, w in zip(modules, weights, strict=True)]
            balance.vector.copy_(vector)  # all is there: from here on nothing fails
            for x, rows, weight in zip(modules, made, weights, strict=True):
                x._sage_linear.keep(rows, weight.device)  # type: ignore[union-attr]


def find_neighbours(model: torch.nn.Module, modules: list[Any]) -> None:
    """Have swapped layers that may read the same activation decide on its balance together; for those still open."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = repeated_blocks(model)
    new: dict[tuple[str, int], list[list[Any]]] = {}
    for module in modules:
        state = module._sage_linear
        if state.neighbours is None and not state.is_balanced and not state.is_weight_only:
            block = next((block for block in blocks if names[id(module)].startswith(block)), "")
            units = new.setdefault((block, module.in_features), [])
            if state.storage.modules[0] is module:
                units.append(state.storage.modules)
    for units in new.values():
        neighbours = Neighbours(units)
        for unit in units:
            for module in unit:
                module._sage_linear.neighbours = neighbours


def weight_on_hand(module: Any) -> torch.Tensor | None:
    """The weight of a swapped layer, in 16 bit or cast to rest; None while it is offloaded, or dropped."""
    weight = module._parameters.get("weight")
    if weight is None or module._sage_linear.dropped or weight.is_meta:
        return None
    return weight if weight.dtype in (*DTYPES, *AT_REST) else None


def _near(weight: Any) -> torch.Tensor:
    is_slow = weight.device.type == "cpu" and weight.numel() >= 2**20 and torch.cuda.is_available()
    return weight.detach().cuda() if is_slow else weight


def _size_of(module: Any) -> torch.Tensor | None:
    weight = weight_on_hand(module)
    return None if weight is None else column_sizes(_near(weight))


def _join(groups: list[Any], modules: list[Any], sizes: list[Any], *, even_ordinary: bool) -> None:
    """Add modules to the first group with the same outliers; even_ordinary: to one without outliers too."""
    known = [size for size in sizes if size is not None]
    mean = torch.stack(known).mean(0) if known else None
    for others, other_sizes in groups:
        known = [size for size in other_sizes if size is not None]
        if mean is None or not known:
            continue
        theirs = torch.stack(known).mean(0)
        if (even_ordinary or ((mean <= -OFF).any() and (theirs <= -OFF).any())) and _alike(mean, theirs):
            others += modules
            other_sizes += sizes
            return
    groups.append((list(modules), list(sizes)))


def _give(modules: list[Any], sizes: list[Any]) -> None:
    known = [size for size in sizes if size is not None]
    exponents = exponents_of(known) if known else torch.zeros((), dtype=torch.float32, device="cpu")
    device = modules[0]._parameters["weight"].device
    balance = Balance(torch.exp2(exponents).to(device)) if exponents.any() else None
    for module in modules:
        module._sage_linear.balance, module._sage_linear.is_balanced = balance, True


def share_known(modules: list[Any], vectors: list[torch.Tensor | None]) -> None:
    """Give layers the balances of a file; equal ones are one."""
    known: list[Balance] = []
    for module, vector in zip(modules, vectors, strict=True):
        state = module._sage_linear
        state.is_balanced = True
        if vector is not None:
            found = next((x for x in known if torch.equal(x.vector, vector)), None)
            if found is None:
                found = Balance(vector)
                known.append(found)
            state.balance = found
