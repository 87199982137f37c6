"""Fuse head norms and the rotary embedding in front of attention, in graphs of compiled code.

Does on Dynamo's graph what postponed_heads.py does in eager code. A concatenation along the sequence, as joint
attention to text and image has it, is part of the same pass. Only queries and keys of our own attention ops are
changed: layers that run in 16 bit keep the model's bits.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sage_kernels.checks import DTYPES, MAX_HEAD_DIM

from ...linears.compiled.graph_edits import add_call, calls_of, erase, is_free, value_of


OPS = ("attention", "attention_lse", "attention_planned", "attention_planned_lse")


class _Angles(NamedTuple):
    """Arguments of one call of the rotary embedding.

    Attributes: freqs: graph nodes of cos and sin, or the one of complex numbers. pairs: True if channels 2i and 2i + 1
        rotate together, as `pairs` of `qk_norm_rope`.
    """

    freqs: tuple[Any, ...]
    pairs: bool


class _Segment(NamedTuple):
    """A segment of the sequence that was normalised and rotated by itself, such as the text tokens."""

    x: torch.fx.Node
    weight: Any
    eps: float | None  # of the norm; None without a norm
    angles: _Angles | None


class _Heads(NamedTuple):
    """Queries or keys, traced back to the tensors in front of norm and rotary embedding.

    Attributes: segments: in the order of the sequence. angles: of a rotary embedding of the whole sequence, or None.
        made: the graph nodes that the fused call replaces.
    """

    segments: tuple[_Segment, ...]
    angles: _Angles | None
    made: tuple[torch.fx.Node, ...]


def fuse_heads(graph: torch.fx.Graph) -> None:
    """Replace norms and rotary embeddings in front of our attention ops by one call for Q and K.

    Changes results only by the roundings between the replaced ops.
    """
    for name in OPS:
        for node in calls_of(graph, name):
            _fuse(graph, node)
    graph.lint()


def _fuse(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    query, key, *rest = node.args
    q, k = _heads_of(query), _heads_of(key)
    if q is None or k is None or not _fit(q, k):
        return
    first = min((*q.made, *k.made))
    if not is_free(first, node) or not _are_readable(q, k):
        return
    segment = q.segments[0]
    angles = [q.angles] if q.angles is not None else [s.angles for s in q.segments if s.angles is not None]
    tables = [_tables(graph, node, each) for each in angles]
    made = add_call(
        graph, node, torch.ops.sage_kernels.qk_norm_rope.default,
        *([s.x for s in heads.segments] for heads in (q, k)),
        *([s.weight for s in heads.segments] for heads in (q, k)),
        segment.eps is not None, segment.eps or 0.0, [cos for cos, _ in tables], [sin for _, sin in tables],
        angles[0].pairs if angles else True, False,
    )  # fmt: skip
    node.args = (*(add_call(graph, node, operator.getitem, made, i) for i in (0, 1)), *rest)
    for nodes in (q.made, k.made):
        erase(graph, *nodes)


def _tables(graph: torch.fx.Graph, node: torch.fx.Node, angles: _Angles) -> tuple[Any, Any]:
    if len(angles.freqs) == 2:
        return angles.freqs[0], angles.freqs[1]
    both = add_call(graph, node, torch.view_as_real, angles.freqs[0])
    cos, sin = (add_call(graph, node, operator.getitem, both, (Ellipsis, i)) for i in (0, 1))
    return cos, sin


def _heads_of(node: Any) -> _Heads | None:
    """Trace queries or keys [B, S, H, D] back through concatenation, rotary embedding and norm.

    Returns None if none of these is found, or if other nodes use an intermediate result.
    """
    whole = value_of(node)
    if whole is None or whole.dim() != 4 or whole.dtype not in DTYPES:
        return None
    if whole.shape[3] % 2 or whole.shape[3] > MAX_HEAD_DIM or len(node.users) > 1:
        return None
    made, angles = [], _angles(node)
    if angles is not None:
        made.append(node)
        node = node.args[0]
    pieces = _pieces(node)
    if len(pieces) > 1:
        made.append(node)
    segments = []
    for piece in pieces:
        own = _angles(piece) if angles is None else None
        if own is not None:
            made.append(piece)
            piece = piece.args[0]
        x, weight, eps = _norm(piece)
        if eps is not None:
            made.append(piece)
        value = value_of(x)
        if value is None or value.dtype != whole.dtype or value.stride(3) != 1:
            return None
        segments.append(_Segment(x, weight, eps, own))
    if any(len(each.users) > 1 for each in made):
        return None
    if len(segments) == 1 and angles is not None:
        segments, angles = [segments[0]._replace(angles=angles)], None
    return _Heads(tuple(segments), angles, tuple(made)) if made else None


def _fit(q: _Heads, k: _Heads) -> bool:
    """Check that one fused call can compute both Q and K.

    It takes one kind of norm with one eps, and one table of angles for the whole sequence or one for each segment.
    """
    if len(q.segments) != len(k.segments) or q.angles != k.angles:
        return False
    first = q.segments[0]
    for a, b in zip(q.segments, k.segments, strict=True):
        x, y = value_of(a.x), value_of(b.x)
        if x is None or y is None or x.shape[:2] != y.shape[:2] or x.shape[3] != y.shape[3] or x.dtype != y.dtype:
            return False
        if not a.eps == b.eps == first.eps or (a.angles is None) != (first.angles is None) or a.angles != b.angles:
            return False
        if not (a.weight is None) == (b.weight is None) == (first.weight is None):
            return False
        if a.angles is not None and first.angles is not None and a.angles.pairs != first.angles.pairs:
            return False
    return True


def _are_readable(*every: _Heads) -> bool:
    """True if all inputs are on one device and no angles are lazily conjugated or negated views."""
    device = None
    for heads in every:
        angles = [each for each in (heads.angles, *(segment.angles for segment in heads.segments)) if each is not None]
        tables = [value_of(x) for each in angles for x in each.freqs]
        if any(x is None or x.is_conj() or x.is_neg() for x in tables):
            return False
        read = [value_of(x) for segment in heads.segments for x in (segment.x, segment.weight) if x is not None]
        for x in (*read, *tables):
            device = device or (None if x is None else x.device)
            if x is None or x.device != device:
                return False
    return True


def _angles(node: Any) -> _Angles | None:
    """Return the angles if a node calls the rotary op of rotary.py, else None."""
    op = torch.ops.sage_processors.rotary
    if not isinstance(node, torch.fx.Node) or node.target not in (op, op.default) or node.kwargs:
        return None
    _, freqs, _, use_real, unbind_dim = node.args
    return _Angles(tuple(freqs), not use_real or unbind_dim == -1)  # type: ignore[arg-type]


def _pieces(node: Any) -> tuple[Any, ...]:
    """Return the tensors that a node concatenates along the sequence; (node,) for any other node."""
    if not isinstance(node, torch.fx.Node) or node.target not in (torch.cat, torch.concat):
        return (node,)
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    tensors = given.get("tensors")
    is_known = isinstance(tensors, (list, tuple)) and set(given) == {"tensors", "dim"} and given["dim"] in (1, -3)
    return tuple(tensors) if is_known else (node,)  # type: ignore[arg-type]


def _norm(node: Any) -> tuple[Any, Any, float | None]:
    """Return (input, weight, eps) of an RMSNorm over head_dim; (node, None, None) for any other node."""
    plain = (node, None, None)
    if not isinstance(node, torch.fx.Node) or node.target not in (F.rms_norm, torch.rms_norm):
        return plain
    names = ("input", "normalized_shape", "weight", "eps")
    given: dict[str, Any] = {"weight": None, "eps": None} | dict(zip(names, node.args, strict=False)) | node.kwargs
    x, weight = value_of(given.get("input")), value_of(given["weight"])
    if x is None or x.dim() != 4 or tuple(given.get("normalized_shape") or ()) != tuple(x.shape[-1:]):
        return plain
    if given["weight"] is not None and (weight is None or weight.dtype not in DTYPES):
        return plain
    eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
    return (given["input"], given["weight"], float(eps)) if isinstance(eps, (int, float)) else plain
