"""Balances: per-channel factors that move outliers of an activation into the weights.

When a layer is swapped, its activations are not known, but its weight is. A channel with outliers has small columns in
all weights that read it: LayerNorm's gain and training lead to that, and so do outliers planted in pairs of inverse
factors. So the balance scales columns that are far below the others up to them, and scales the activation's channels
down by the same factors. A layer without such columns has no balance and costs nothing.
Factors are powers of two, which round neither side; those of a run (measured_balance.py) are finer. The product is the
same with any balance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sage_kernels.compat import mark_static_address

from .weights.layers import repeated_blocks
from .weights.linear_state import AT_REST, DTYPES, in_16_bit, linear_state
from .weights.storage import is_captured


# A column is far below the others if its norm is at most a quarter of the median. In a balanced channel rounding the
# activation counts as much as in all others. If the channel has no outliers, that wastes at most 1.5 bits. In at
# most an eighth of the channels, this costs less than a wider range of numbers would cost in all of them.
OFF = 2.0  # in powers of two
MAX_SHARE = 1 / 8  # of the channels
MOST = 24.0  # largest exponent of a factor, in powers of two


class _Cast(NamedTuple):
    """A balance in a 16-bit type, of the vector with this version."""

    vector: torch.Tensor
    version: int
    made: torch.Tensor
    is_exact: bool


class Balance:
    """Balance of one activation, shared by all layers that read it.

    Attributes:
        vector: fp32 [K]. `quantize_activation` multiplies by it, `quantize_weight` divides.
    """

    def __init__(self, vector: torch.Tensor):
        self.vector = vector
        self._casts: dict[torch.dtype, _Cast] = {}
        mark_static_address(vector, guard=False)

    def in_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the vector in a 16-bit type. Made once: CUDA graphs read it."""
        return self._cast(dtype).made

    def for_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the vector to multiply activations of this dtype by: in the same dtype if it is exact there."""
        cast = self._cast(dtype) if dtype == torch.bfloat16 else None
        return self.vector if cast is None or not cast.is_exact else cast.made

    def _cast(self, dtype: torch.dtype) -> _Cast:
        known = self._casts.get(dtype)
        if known is None or known.vector is not self.vector or known.version != self.vector._version:
            with torch.inference_mode(False), torch.no_grad():
                made = self.vector.to(dtype)
                is_exact = not is_captured(made.device) and torch.equal(made.float(), self.vector)  # waits for a GPU
            self._casts[dtype] = known = _Cast(self.vector, self.vector._version, made, is_exact)
        return known

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the vector on the device of a call, and keep it there."""
        if self.vector.device != device:
            with torch.inference_mode(False), torch.no_grad():
                self.vector = self.vector.to(device)
            mark_static_address(self.vector, guard=False)
        return self.vector


def vector_of(state, device: torch.device) -> torch.Tensor | None:
    """Return the balance [K] of a swapped layer, or None if it has none."""
    return None if state.balance is None else state.balance.on(device)


def column_norms(weight: torch.Tensor) -> torch.Tensor:
    """Return the norms of all columns of a weight [N, K]: fp32 [K], without a copy of it in fp32."""
    return torch.linalg.vector_norm(in_16_bit(weight.detach()), dim=0, dtype=torch.float32)


def column_sizes(weight: torch.Tensor) -> torch.Tensor | None:
    """Return log2(norm / median norm) of all columns of a weight [N, K]: fp32 [K], on the CPU.

    Returns None for a weight that is not finite or mostly zero, as its norms say nothing.
    """
    norms = column_norms(weight).cpu()
    middle = norms.median()
    if not (norms.isfinite().all() and middle > 0):
        return None
    return (norms / middle).log2().clamp_min(-MOST)


def exponents_of(sizes: list[torch.Tensor]) -> torch.Tensor:
    """Return the exponents [K], 0 or less, of the balance for weights with these `column_sizes`."""
    size = torch.stack(sizes).mean(0)
    far = size <= -OFF
    if far.sum() > MAX_SHARE * len(size):  # too many to be outliers
        far[:] = False
    return torch.where(far, size.round(), torch.zeros_like(size))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the same columns are far below the others in both weights, within a factor of two."""
    far = (a <= -OFF) | (b <= -OFF)
    return bool(((a - b)[far].abs() <= 1).all())


class Neighbours:
    """Linear layers of one block with equal in_features, which decide on their balances together.

    Layers with the same outliers are taken to read the same activation and share a balance. The decision that a layer
    has a balance, or has none, is made once, before it is first quantised: captured CUDA graphs depend on it. Later
    only the factors may change.

    Attributes: units: lists of layers that are known to read one activation, as their weights are one matrix.
    """

    def __init__(self, units: list[list[Any]]):
        self.units = units
        self._is_open = True  # no layer was decided on yet

    def _members(self, unit: list[Any]) -> list[Any]:
        """Return the layers of a unit that are still swapped."""
        return [x for x in unit if (state := linear_state(x)) is not None and state.neighbours is self]

    def decide(self, module: Any) -> None:
        """Give a layer its balance, or none.

        If all weights are at hand, its neighbours are decided on at the same time; else this layer alone.
        """
        state = module._sage
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

    def follow_weight(self, module: Any) -> None:
        """Compute a balance again after a weight has changed, and quantise all layers that share it.

        Only between calls. If a weight is not at hand, all stays as it is, which is correct but less accurate.
        """
        balance = module._sage.balance
        if balance is None:
            return
        modules = [x for unit in self.units for x in self._members(unit) if x._sage.balance is balance]
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
            made = [x._sage.rows_from(_near(w), vector) for x, w in zip(modules, weights, strict=True)]
            balance.vector.copy_(vector)  # everything is computed: from here on nothing fails
            for x, rows, weight in zip(modules, made, weights, strict=True):
                x._sage.keep(rows, weight.device)  # type: ignore[union-attr]


def find_neighbours(model: torch.nn.Module, modules: list[Any]) -> None:
    """Group swapped layers that may read the same activation, to decide on its balance together.

    Layers that have neighbours, or were decided on already, stay as they are.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = repeated_blocks(model)
    new: dict[tuple[str, int], list[list[Any]]] = {}
    for module in modules:
        state = module._sage
        if state.neighbours is None and not state.is_balanced and not state.is_weight_only:
            block = next((block for block in blocks if names[id(module)].startswith(block)), "")
            units = new.setdefault((block, module.in_features), [])
            if state.storage.modules[0] is module:
                units.append(state.storage.modules)
    for units in new.values():
        neighbours = Neighbours(units)
        for unit in units:
            for module in unit:
                module._sage.neighbours = neighbours


def weight_on_hand(module: Any) -> torch.Tensor | None:
    """Return the weight of a swapped layer (16 or 32 bit, or FP8 at rest); None if offloaded or dropped."""
    weight = module._parameters.get("weight")
    if weight is None or module._sage.dropped or weight.is_meta:
        return None
    return weight if weight.dtype in (*DTYPES, *AT_REST) else None


def _near(weight: Any) -> torch.Tensor:
    is_slow = weight.device.type == "cpu" and weight.numel() >= 2**20 and torch.cuda.is_available()
    return weight.detach().cuda() if is_slow else weight


def _size_of(module: Any) -> torch.Tensor | None:
    weight = weight_on_hand(module)
    return None if weight is None else column_sizes(_near(weight))


def _join(groups: list[Any], modules: list[Any], sizes: list[Any], *, even_ordinary: bool) -> None:
    """Add modules to the first group with the same outliers, or make a group of them.

    even_ordinary: modules without outliers join a group without outliers too.
    """
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
        module._sage.balance, module._sage.is_balanced = balance, True


def share_measured(layers: list[tuple[Any, Any]], vectors: dict[str, torch.Tensor]) -> None:
    """Give undecided layers (module, state) the balances that a run of the model showed, by label.

    Layers with the same tensor share a balance.
    """
    made: dict[int, Balance] = {}
    for _, state in layers:
        vector = None if state.is_balanced or state.is_weight_only else vectors.get(state.label)
        if vector is not None:
            state.balance, state.is_balanced = made.setdefault(id(vector), Balance(vector)), True


def share_known(modules: list[Any], vectors: list[torch.Tensor | None]) -> None:
    """Give layers the balances from a file. Layers with equal vectors share a balance."""
    known: list[Balance] = []
    for module, vector in zip(modules, vectors, strict=True):
        state = module._sage
        state.is_balanced = True
        if vector is not None:
            found = next((x for x in known if torch.equal(x.vector, vector)), None)
            if found is None:
                found = Balance(vector)
                known.append(found)
            state.balance = found
