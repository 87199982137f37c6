"""Queries and keys whose norm and rotary embedding wait for attention: one kernel makes both."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from sage_kernels import qk_norm_rope

from ...linears.postponed.errors import ChangedInputError
from ...postponed.enclosure import Enclosure
from ...postponed.region import current
from ...postponed.tensor import Operand, Postponed, ordinary_in


class Norm(NamedTuple):
    """An RMSNorm over the channels of a head. weight: [D] or None; of: Operands, what it was made of."""

    weight: torch.Tensor | None
    eps: float
    of: tuple[Operand, ...] = ()


class Angles(NamedTuple):
    """Angles of a rotary embedding.

    cos, sin: [S, D] or [S, D / 2]. pairs: channels 2i and 2i + 1 turn together; else i and i + D / 2. of: Operands of
    what the model handed over, by which two calls are known to have the same angles.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    pairs: bool
    of: tuple[Operand, ...]

    def are_of(self, tensors, pairs: bool) -> bool:
        """True if these are the angles of such a call, unchanged since."""
        known = all(mine.tensor is x and not mine.is_changed for mine, x in zip(self.of, tensors, strict=False))
        return known and len(self.of) == len(tensors) and self.pairs == pairs


class Part(NamedTuple):
    """Tokens of one origin. x: Operand of [B, S, H, D], before everything. norm, angles: None without."""

    x: Operand
    norm: Norm | None
    angles: Angles | None


class HeadSource:
    """A norm or rotary embedding in front of attention, and what is known of its results.

    Attributes:
        label: of the layer. is_postponed: its results may wait. is_proven: one did, and its input was not written to
            meanwhile.
        angles: of the latest rotary embedding: that of the keys mostly has those of the queries.
    """

    def __init__(self, label: str):
        self.label, self.is_postponed, self.is_proven = label, True, False
        self.angles: Angles | None = None
        self._enclosure = Enclosure()

    def is_closed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if a call of this attention module's processor runs code of libraries alone."""
        return isinstance(module, nn.Module) and self._enclosure.is_closed(module, args, kwargs)

    def __getstate__(self):
        return self.__dict__ | {"angles": None}


class PostponedHeads(Postponed):
    """[B, S, H, D] of parts, each normed and turned; `angles` of all parts together, or None.

    compute: () -> what the model's own code would have made, in 16 bit. of: heads whose numbers that reads.
    """

    def __init__(self, shape, dtype, device, parts, angles, sources, compute, of=()):
        super().__init__(shape, dtype, device)
        self._of: tuple[PostponedHeads, ...] = of
        self._parts: tuple[Part, ...] = parts
        self._angles: Angles | None = angles
        self._sources: tuple[HeadSource, ...] = sources
        self._own = compute
        if not all(source.is_proven for source in sources):
            self.value()  # whether the model writes to the input before the heads are used is not known yet

    @property
    def is_stale(self) -> bool:
        angles = [self._angles, *(part.angles for part in self._parts)]
        read = [part.x for part in self._parts] + [x for each in angles if each is not None for x in each.of]
        read += [x for part in self._parts if part.norm is not None for x in part.norm.of]
        return any(x.is_changed for x in read)

    def _compute(self):
        if self.is_stale:
            raise ChangedInputError(
                f"queries or keys of {self._sources[0].label}: got a tensor that was written to in place between norm "
                "or rotary embedding and attention, expected the one that these were called with; the first calls "
                'were without such writes. Keep this layer\'s attention in 16 bit: layers={name: {"recipe": "16bit"}}'
            )
        return self._own()

    def _reads(self, other):
        return any(other is x for x in self._of)

    @property
    def is_turned(self) -> bool:
        """True after a rotary embedding, of the whole or of its parts."""
        return self._angles is not None or any(part.angles is not None for part in self._parts)

    def turned(self, angles: Angles, compute) -> PostponedHeads | None:
        """After a rotary embedding of the whole; None: it can't wait for that."""
        if self.is_turned or self._is_out:
            return None
        parts: tuple[Part, ...] = self._parts
        whole: Angles | None = angles
        if len(parts) == 1:
            parts, whole = (parts[0]._replace(angles=angles),), None
        return PostponedHeads(self._shape, self._dtype, self._device, parts, whole, self._sources, compute, (self,))

    @classmethod
    def _knows(cls, func):
        return _KNOWN.get(func)


def _cat(args, kwargs):
    """Parts of the sequence side by side."""
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if current() is None or dim not in (1, -3) or "out" in kwargs:
        return None
    if not all(type(x) is PostponedHeads for x in tensors):
        return None
    first = tensors[0]
    if any(x._is_out or x._angles is not None or x._dtype != first._dtype for x in tensors):
        return None
    if any((x.shape[0], x.shape[2:]) != (first.shape[0], first.shape[2:]) for x in tensors):
        return None
    parts = tuple(part for x in tensors for part in x._parts)
    shape = torch.Size((first.shape[0], sum(x.shape[1] for x in tensors), *first.shape[2:]))
    sources = tuple(source for x in tensors for source in x._sources)

    def own():
        return torch.cat([x.value() for x in tensors], 1)

    return PostponedHeads(shape, first._dtype, first._device, parts, None, sources, own, tuple(tensors))


_KNOWN = {torch.cat: _cat, torch.concat: _cat}


def made_ready(query, key):
    """Compute queries and keys [B, S, H, D] that wait, both in one kernel if their norms and angles fit."""
    if type(query) is not PostponedHeads or type(key) is not PostponedHeads:
        return ordinary_in(query), ordinary_in(key)
    sources = (*query._sources, *key._sources)
    if query._is_out or key._is_out or not _fit(query, key):
        return query.tensor(), key.tensor()
    if query.is_stale or key.is_stale:
        if all(source.is_proven for source in sources):
            return query.tensor(), key.tensor()  # raises
        for source in sources:
            source.is_postponed = False  # this model writes to what it has normed or turned
        return query.tensor(), key.tensor()
    for source in sources:
        source.is_proven = True
    part = query._parts[0]
    angles = [query._angles] if query._angles is not None else [p.angles for p in query._parts if p.angles is not None]
    made: tuple[torch.Tensor, torch.Tensor] = qk_norm_rope(
        [p.x.tensor for p in query._parts],
        [p.x.tensor for p in key._parts],
        [None if p.norm is None else p.norm.weight for p in query._parts],
        [None if p.norm is None else p.norm.weight for p in key._parts],
        norm=part.norm is not None,
        eps=0.0 if part.norm is None else part.norm.eps,
        cos=[x.cos for x in angles],
        sin=[x.sin for x in angles],
        pairs=not angles or angles[0].pairs,
    )
    return made


def _fit(query: PostponedHeads, key: PostponedHeads) -> bool:
    """True if one kernel can compute both: equal parts, angles, eps, dtypes, and norms of one kind."""
    mine, others = query._parts, key._parts
    if len(mine) != len(others) or query._dtype != key._dtype:
        return False
    first = mine[0]
    for part, other in zip(mine, others, strict=True):
        for x in (part, other):
            if (x.norm is None) != (first.norm is None) or x.x.tensor.dtype != query._dtype:
                return False
            if (x.angles is None) != (first.angles is None):
                return False
            if x.norm is not None and first.norm is not None:
                if x.norm.eps != first.norm.eps or (x.norm.weight is None) != (first.norm.weight is None):
                    return False
            if x.angles is not None and x.angles.pairs != first.angles.pairs:  # type: ignore[union-attr]
                return False
        if part.x.tensor.shape[1] != other.x.tensor.shape[1] or not _same(part.angles, other.angles):
            return False
    return _same(query._angles, key._angles)


def _same(a: Angles | None, b: Angles | None) -> bool:
    return a is b or (a is not None and b is not None and a.are_of([x.tensor for x in b.of], b.pairs))
