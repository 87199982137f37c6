"""Queries and keys whose norm and rotary embedding are postponed until attention, in one kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from sage_kernels import qk_norm_rope
from sage_kernels.checks import MAX_HEAD_DIM

from ...postponed.enclosure import Enclosure
from ...postponed.patterns import bound
from ...postponed.region import current
from ...postponed.tensor import ChangedInputError, Operand, Postponed, ordinary_in


class Norm(NamedTuple):
    """An RMSNorm over head_dim, or across all heads of a token.

    Attributes: weight: [D], with across_heads [H·D], or None. of: Operands of the parameters that it was read from.
    """

    weight: torch.Tensor | None
    eps: float
    of: tuple[Operand, ...] = ()
    across_heads: bool = False


class Angles(NamedTuple):
    """Angles of a rotary embedding.

    Attributes: cos, sin: [S, D] or [S, D / 2]. pairs: True if channels 2i and 2i + 1 rotate together, False for
        channels i and i + D / 2. of: Operands of the tensors that the model passed. Two calls with the same unchanged
        tensors have the same angles.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    pairs: bool
    of: tuple[Operand, ...]

    def are_of(self, tensors, pairs: bool) -> bool:
        """True if a call with these tensors has these angles, and nothing was written to them since."""
        if len(self.of) != len(tensors) or self.pairs != pairs:
            return False
        for mine, x in zip(self.of, tensors, strict=True):
            if mine.tensor is not x or mine.is_changed:
                return False
        return True


class Segment(NamedTuple):
    """A segment of the sequence that was normalised and rotated by itself, such as the text tokens.

    Attributes: x: Operand of the tensor [B, S, H, D] in front of both, or [B, S, H·D] of a norm across heads that are
        not split yet. norm, angles: None if there is no such op.
    """

    x: Operand
    norm: Norm | None
    angles: Angles | None


class HeadSource:
    """One norm or rotary embedding in front of attention, and if its results may be postponed.

    Attributes:
        label: name of the layer in messages.
        is_postponed: its results may be postponed.
        is_proven: a result was postponed, and nothing wrote to its input before it was computed. Until then, the
            model's own result is computed at once, as a reserve.
        angles: of the latest rotary embedding. The one of the keys mostly has the same angles as the one of the
            queries.
    """

    def __init__(self, label: str):
        self.label, self.is_postponed, self.is_proven = label, True, False
        self.angles: Angles | None = None
        self._enclosure = Enclosure()

    def is_closed(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the processor call of this attention module runs only code of known libraries."""
        return isinstance(module, nn.Module) and self._enclosure.is_closed(module, args, kwargs)

    def __getstate__(self):
        return self.__dict__ | {"angles": None}


class PostponedHeads(Postponed):
    """Postponed queries or keys [B, S, H, D]: segments, each with its norm and rotary embedding.

    Models that call PyTorch's attention directly have them as [B, H, S, D] at first, and their segments likewise.

    Args: angles: of a rotary embedding of all segments together, or None. compute: function without arguments that
        returns the result of the model's own code, in 16 bit. of: other PostponedHeads that `compute` reads.
        viewed: the one that the result is a view of, if any. axis: dimension along which segments are joined.
    """

    def __init__(self, shape, dtype, device, segments, angles, sources, compute, of=(), viewed=None, axis=1):
        self._of: tuple[PostponedHeads, ...] = of
        self._axis = axis
        self._viewed: PostponedHeads | None = viewed
        self._segments: tuple[Segment, ...] = segments
        self._angles: Angles | None = angles
        self._sources: tuple[HeadSource, ...] = sources
        self._own = compute
        if not all([source.is_proven for source in sources]):
            self.value()  # the model may still write to the input before the heads are used

    @property
    def is_stale(self) -> bool:
        """True if something wrote to an input since, so that the result can no longer be computed."""
        read = [] if self._angles is None else [*self._angles.of]
        for x, norm, angles in self._segments:
            read.append(x)
            read.extend(() if norm is None else norm.of)
            read.extend(() if angles is None else angles.of)
        return any([x.tensor._version != x.version for x in read])

    def _compute(self):
        if self.is_stale:
            raise ChangedInputError(
                f"queries or keys of {self._sources[0].label}: got an input that was written to in place between norm "
                "or rotary embedding and attention, expected it unchanged, as in the first calls; keep this layer's "
                'attention in 16 bit with layers={name: {"recipe": "16bit"}}'
            )
        return self._own()

    def _reads(self, other):
        return any([other is x for x in self._of])

    def tensor(self):
        """Return the ordinary tensor for any use: whoever writes to a view writes to what it is a view of."""
        if self._viewed is not None and not self._is_out:
            self._viewed.tensor()
        return super().tensor()

    @property
    def may_be_written(self) -> bool:
        """True if the ordinary tensor was handed out, or one with the same memory."""
        return self._is_out or (self._viewed is not None and self._viewed.may_be_written)

    @property
    def is_turned(self) -> bool:
        """True if a rotary embedding was applied to the whole sequence or to a segment."""
        return self._angles is not None or any([segment.angles is not None for segment in self._segments])

    def turned(self, angles: Angles, compute) -> PostponedHeads | None:
        """Apply a rotary embedding to the whole sequence. Returns None if this one can't be postponed."""
        if self.is_turned or self.may_be_written or len(self._shape) != 4 or self._axis != 1:
            return None
        segments: tuple[Segment, ...] = self._segments
        whole: Angles | None = angles
        if len(segments) == 1:
            segments, whole = (segments[0]._replace(angles=angles),), None
        return PostponedHeads(self._shape, self._dtype, self._device, segments, whole, self._sources, compute, (self,))

    @classmethod
    def _knows(cls, func):
        return _KNOWN.get(func)


def _cat(args, kwargs):
    """Concatenate postponed heads along the sequence; None if the result can't be postponed."""
    given = bound({"tensors": None, "dim": 0}, args, kwargs)
    axis = None if given is None else _AXES.get(given["dim"])
    if given is None or current() is None or axis is None or not isinstance(given["tensors"], (list, tuple)):
        return None
    tensors = given["tensors"]
    first, tokens = tensors[0], 0
    segments: tuple[Segment, ...] = ()
    sources: tuple[HeadSource, ...] = ()
    for x in tensors:
        if type(x) is not PostponedHeads or x.may_be_written or x._angles is not None or x._dtype != first._dtype:
            return None
        if len(x._shape) != 4 or (len(x._segments) > 1 and x._axis != axis):
            return None
        if x._shape[:axis] != first._shape[:axis] or x._shape[axis + 1 :] != first._shape[axis + 1 :]:
            return None
        segments, sources, tokens = segments + x._segments, sources + x._sources, tokens + x._shape[axis]
    shape = torch.Size((*first._shape[:axis], tokens, *first._shape[axis + 1 :]))

    def own():
        return torch.cat([x.value() for x in tensors], axis)

    of = tuple(tensors)
    return PostponedHeads(shape, first._dtype, first._device, segments, None, sources, own, of, axis=axis)


def _transposed(args, kwargs):
    """Exchange tokens and heads, [B, H, S, D] and [B, S, H, D]; None if the result can't be postponed."""
    x = args[0] if args else None
    if current() is None or type(x) is not PostponedHeads or len(args) != 3 or kwargs:
        return None
    if len(x._shape) != 4 or {_AXES.get(dim) for dim in args[1:]} != {1, 2}:
        return None
    if x._angles is not None or x.may_be_written or x.is_stale:
        return None
    segments = tuple(s._replace(x=Operand(s.x.tensor.transpose(1, 2))) for s in x._segments)
    batch, rows, columns, width = x._shape
    return PostponedHeads(
        torch.Size((batch, columns, rows, width)), x._dtype, x._device, segments, None, x._sources,
        lambda: x.value().transpose(1, 2), (x,), x, 3 - x._axis,
    )  # fmt: skip


def _part(args, kwargs):
    """Take some tokens of normed heads [B, S, H, D]; None if the result can't be postponed."""
    x, index = args if len(args) == 2 and not kwargs else (None, None)
    if current() is None or type(x) is not PostponedHeads or type(index) is not tuple or len(index) != 2:
        return None
    if len(x._shape) != 4 or len(x._segments) != 1 or x.is_turned or x.may_be_written or x.is_stale:
        return None
    if type(index[0]) is not slice or type(index[1]) is not slice:
        return None
    places = (index[1].start, index[1].stop, index[1].step)
    if not all(type(place) in (int, type(None)) for place in places) or index[1].step not in (None, 1):
        return None
    if any(place is not None for place in (index[0].start, index[0].stop, index[0].step)):
        return None
    view = x._segments[0].x.tensor[index]
    segment = x._segments[0]._replace(x=Operand(view))
    return PostponedHeads(
        view.shape, x._dtype, x._device, (segment,), None, x._sources, lambda: x.value()[index], (x,), x
    )


def _split(args, kwargs):
    """Split the channels of all heads [B, S, H·D] into heads; None if the result can't be postponed."""
    x = args[0]
    names = ("dim", "sizes")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    if current() is None or type(x) is not PostponedHeads or given.keys() != set(names):
        return None
    sizes = given["sizes"]
    if len(x._shape) != 3 or x.may_be_written or x.is_stale or given["dim"] not in (2, -1) or len(sizes) != 2:
        return None
    view = x._segments[0].x.tensor.unflatten(2, tuple(sizes))
    if view.shape[3] % 2 or view.shape[3] > MAX_HEAD_DIM:
        return None

    def own():
        return x.value().unflatten(2, tuple(sizes))

    segment = x._segments[0]._replace(x=Operand(view))
    return PostponedHeads(view.shape, x._dtype, x._device, (segment,), None, x._sources, own, (x,), x)


def _type_as(args, kwargs):
    """Cast an ordinary tensor to the dtype of postponed heads; None for other arguments."""
    x, like = args if len(args) == 2 else (None, None)
    if type(x) is not torch.Tensor or type(like) is not PostponedHeads or x.device != like._device:
        return None
    return x.to(like._dtype)


_AXES = {1: 1, -3: 1, 2: 2, -2: 2}  # tokens or heads
_KNOWN = {
    torch.cat: _cat, torch.concat: _cat, torch.Tensor.unflatten: _split, torch.Tensor.__getitem__: _part,
    torch.Tensor.type_as: _type_as, torch.Tensor.transpose: _transposed,
}  # fmt: skip


def compute_heads(query, key):
    """Compute postponed queries and keys [B, S, H, D], both in one kernel if their norms and angles fit.

    Returns ordinary tensors. Raises: ChangedInputError if an input was written to meanwhile.
    """
    if type(query) is not PostponedHeads or type(key) is not PostponedHeads:
        return ordinary_in(query), ordinary_in(key)
    sources = (*query._sources, *key._sources)
    if query.may_be_written or key.may_be_written or not _fit(query, key):
        return query.tensor(), key.tensor()
    if query.is_stale or key.is_stale:
        if all(source.is_proven for source in sources):
            return query.tensor(), key.tensor()  # raises
        for source in sources:
            source.is_postponed = False  # this model writes to inputs of its norms or rotary embeddings
        return query.tensor(), key.tensor()
    for source in sources:
        source.is_proven = True
    segment = query._segments[0]
    angles = [query._angles] if query._angles is not None else [s.angles for s in query._segments]
    known = [x for x in angles if x is not None]
    angles = angles if known else []
    made: tuple[torch.Tensor, torch.Tensor] = qk_norm_rope(
        [s.x.tensor for s in query._segments],
        [s.x.tensor for s in key._segments],
        [None if s.norm is None else s.norm.weight for s in query._segments],
        [None if s.norm is None else s.norm.weight for s in key._segments],
        norm=segment.norm is not None,
        eps=0.0 if segment.norm is None else segment.norm.eps,
        cos=[None if x is None else x.cos for x in angles],
        sin=[None if x is None else x.sin for x in angles],
        pairs=not known or known[0].pairs,
        across_heads=segment.norm is not None and segment.norm.across_heads,
    )
    return made


def _fit(query: PostponedHeads, key: PostponedHeads) -> bool:
    """True if one kernel can compute both: same segments, angles, eps and dtype, and one kind of norm."""
    mine, others = query._segments, key._segments
    if len(mine) != len(others) or query._dtype != key._dtype or len(query._shape) != 4 or len(key._shape) != 4:
        return False
    if len(mine) > 1 and (query._axis, key._axis) != (1, 1):
        return False
    first = mine[0]
    for segment, other in zip(mine, others, strict=True):
        for x in (segment, other):
            if (x.norm is None) != (first.norm is None) or x.x.tensor.dtype != query._dtype:
                return False
            if x.norm is not None and first.norm is not None:
                if x.norm.eps != first.norm.eps or (x.norm.weight is None) != (first.norm.weight is None):
                    return False
                if x.norm.across_heads != first.norm.across_heads:
                    return False
        if segment.x.tensor.shape[1] != other.x.tensor.shape[1] or not _same(segment.angles, other.angles):
            return False
    turned = {x.angles.pairs for x in mine if x.angles is not None}
    return len(turned) < 2 and _same(query._angles, key._angles)


def _same(a: Angles | None, b: Angles | None) -> bool:
    return a is b or (a is not None and b is not None and a.are_of([x.tensor for x in b.of], b.pairs))
