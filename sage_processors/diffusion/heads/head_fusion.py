"""In compiled code: norms of heads, rotary embedding and parts put side by side, in one pass in front of attention.

What postponed_heads.py does in eager code, on the graph as Dynamo writes it. Only queries and keys of our own
attention ops are looked at: heads of layers that stay exact keep the model's bits.
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
    """freqs: nodes of cos and sin, or of complex numbers. pairs: which channels turn together, see qk_norm_rope."""

    freqs: tuple[Any, ...]
    pairs: bool


class _Part(NamedTuple):
    x: torch.fx.Node
    weight: Any
    eps: float | None  # of the norm; None without
    angles: _Angles | None


class _Heads(NamedTuple):
    """parts, each normed and turned; angles of all of them together, or None. made: the nodes that make them."""

    parts: tuple[_Part, ...]
    angles: _Angles | None
    made: tuple[torch.fx.Node, ...]


def fuse_heads(graph: torch.fx.Graph) -> None:
    """The same numbers but for roundings in between."""
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
    if not is_free(first, node) or not _lie_together(q, k):
        return
    part = q.parts[0]
    angles = [q.angles] if q.angles is not None else [p.angles for p in q.parts if p.angles is not None]
    tables = [_tables(graph, node, each) for each in angles]
    made = add_call(
        graph, node, torch.ops.sage_kernels.qk_norm_rope.default,
        *([p.x for p in heads.parts] for heads in (q, k)), *([p.weight for p in heads.parts] for heads in (q, k)),
        part.eps is not None, part.eps or 0.0, [cos for cos, _ in tables], [sin for _, sin in tables],
        angles[0].pairs if angles else True,
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
    """What queries or keys [B, S, H, D] are made of; None if none of it is known, or others use it, too."""
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
    parts = []
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
        parts.append(_Part(x, weight, eps, own))
    if any(len(each.users) > 1 for each in made):
        return None
    if len(parts) == 1 and angles is not None:
        parts, angles = [parts[0]._replace(angles=angles)], None
    return _Heads(tuple(parts), angles, tuple(made)) if made else None


def _fit(q: _Heads, k: _Heads) -> bool:
    """Whether both are made alike: one pass knows one norm, and one table of angles or one for each part."""
    if len(q.parts) != len(k.parts) or q.angles != k.angles:
        return False
    first = q.parts[0]
    for a, b in zip(q.parts, k.parts, strict=True):
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


def _lie_together(*every: _Heads) -> bool:
    """Whether all that the pass would read is on one device, and angles are the numbers that their memory holds."""
    device = None
    for heads in every:
        angles = [each for each in (heads.angles, *(part.angles for part in heads.parts)) if each is not None]
        tables = [value_of(x) for each in angles for x in each.freqs]
        if any(x is None or x.is_conj() or x.is_neg() for x in tables):
            return False
        read = [value_of(x) for part in heads.parts for x in (part.x, part.weight) if x is not None]
        for x in (*read, *tables):
            device = device or (None if x is None else x.device)
            if x is None or x.device != device:
                return False
    return True


def _angles(node: Any) -> _Angles | None:
    """Of a call of a rotary embedding, as rotary.py has it."""
    op = torch.ops.sage_processors.rotary
    if not isinstance(node, torch.fx.Node) or node.target not in (op, op.default) or node.kwargs:
        return None
    _, freqs, _, use_real, unbind_dim = node.args
    return _Angles(tuple(freqs), not use_real or unbind_dim == -1)  # type: ignore[arg-type]


def _pieces(node: Any) -> tuple[Any, ...]:
    """What was put side by side along the sequence; (node,) if nothing was."""
    if not isinstance(node, torch.fx.Node) or node.target not in (torch.cat, torch.concat):
        return (node,)
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    tensors = given.get("tensors")
    is_known = isinstance(tensors, (list, tuple)) and set(given) == {"tensors", "dim"} and given["dim"] in (1, -3)
    return tuple(tensors) if is_known else (node,)  # type: ignore[arg-type]


def _norm(node: Any) -> tuple[Any, Any, float | None]:
    """(input, weight, eps) of an RMSNorm over a head's channels; (node, None, None) without one."""
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
