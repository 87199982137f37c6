"""Fuses norms, projections of one input and the ops behind a linear layer in compiled code.

It works on Dynamo's graph, in which norms and activation functions are still single calls. Nothing is moved across a
write in place.
"""

from __future__ import annotations

import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from sage_kernels.compat import add_graph_pass

from ...postponed import patterns
from ...postponed.patterns import FLOATS, is_by_token
from . import graph_edits
from .graph_edits import add_call, calls_of, erase, is_call, is_free, value_of


_ADDS, _MULTIPLICATIONS = (operator.add, torch.add), (operator.mul, torch.mul)
_FEW = "weight_only_linear"  # the product of a few rows in 16 bit
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
# positions in `_arguments` of a product, after codes and scales of input and weight
_BIAS, _ACTIVATION, _GATE, _RESIDUAL, _DTYPE = range(4, 9)


def fuse(graph: torch.fx.Graph) -> None:
    """Replace calls in a graph by fewer ones. The results only have fewer roundings in between."""
    _share(graph)
    _merge(graph)
    for node in calls_of(graph, "quantize_activation"):
        _take_norm(graph, node)
    for node in calls_of(graph, "quantize_activation"):
        _take_columns(graph, node)
    for node in _products(graph):
        _finish(graph, node)
    for node in calls_of(graph, "quantize_activation"):
        _join(graph, node)
    graph.lint()


def fuse_in_compiled_code(change: Callable[[torch.fx.Graph], None] = fuse) -> None:
    """Have Inductor call change(graph) on every graph of Dynamo from now on. Harmless when repeated."""
    sources: tuple[Any, ...] = (inspect.getmodule(change), graph_edits, patterns)
    add_graph_pass(change, hashlib.sha256("".join(map(inspect.getsource, sources)).encode()).digest())


# --- one quantisation for each activation, one matmul for all projections of it ---


def _share(graph: torch.fx.Graph) -> None:
    """Replace calls of quantize_activation with equal arguments by the first one."""
    known: dict[Any, torch.fx.Node] = {}
    for node in calls_of(graph, "quantize_activation"):
        first = known.get(node.args)
        if first is None or not is_free(first, node):
            known[node.args] = node
            continue
        parts = {part.args[1]: part for part in first.users if part.target is operator.getitem}
        for part in list(node.users):
            same = parts.get(part.args[1]) if part.target is operator.getitem else None
            if same is None:
                part.replace_input_with(node, first)
            else:
                part.replace_all_uses_with(same)
                graph.erase_node(part)
        # codes and scales of the first call come before all users of the second one
        erase(graph, node)


def _rows_of(node: Any) -> tuple[Any, int, int] | None:
    """Return (matrix, start, stop) of a slice of a matrix's rows; None for any other node."""
    if (
        not isinstance(node, torch.fx.Node)
        or node.target is not operator.getitem
        or not isinstance(node.args[1], slice)
    ):
        return None
    rows = node.args[1]
    whole = isinstance(rows.start, int) and isinstance(rows.stop, int) and rows.step is None
    return (node.args[0], rows.start, rows.stop) if whole else None


def _products(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if any(is_call(node, name) for name in ("quantized_linear", _FEW))]


def _arguments(node: torch.fx.Node) -> list[Any]:
    """Return the arguments of a product as those of `quantized_linear`.

    Rows in 16 bit have None for their scale."""
    return [node.args[0], None, *node.args[1:-1]] if is_call(node, _FEW) else list(node.args)


def _multiply(graph: torch.fx.Graph, before: torch.fx.Node, arguments: list[Any]) -> torch.fx.Node:
    """Insert the product with these `_arguments` in front of a node."""
    ops = torch.ops.sage_kernels
    if arguments[1] is None:
        return add_call(graph, before, ops.weight_only_linear.default, arguments[0], *arguments[2:], False)
    return add_call(graph, before, ops.quantized_linear.default, *arguments)


def _merge(graph: torch.fx.Graph) -> None:
    """Replace layers with the same input by one matmul, if their weights are adjacent rows of one matrix."""
    groups: dict[Any, list[torch.fx.Node]] = {}
    for node in _products(graph):
        args = _arguments(node)
        weight, scale = _rows_of(args[2]), _rows_of(args[3])
        is_plain = args[_ACTIVATION] == "none" and args[_GATE] is None and args[_RESIDUAL] is None
        if weight is not None and scale is not None and weight[1:] == scale[1:] and is_plain:
            key = (*args[:2], weight[0], scale[0], args[_BIAS] is None, args[_DTYPE])
            groups.setdefault(key, []).append(node)
    for (codes, scales, matrix, scale, no_bias, dtype), nodes in groups.items():
        first, last = nodes[0], nodes[-1]
        parts = [_rows_of(_arguments(node)[2]) for node in nodes]
        rows = sorted((part[1:], i) for i, part in enumerate(parts) if part is not None)
        ends = [at for at, _ in rows]
        if len(nodes) == 1 or any(a[1] != b[0] for a, b in zip(ends, ends[1:], strict=False)):
            continue
        biases = [_arguments(nodes[i])[_BIAS] for _, i in rows]
        if not is_free(first, last) or not all(no_bias or _is_before(bias, first) for bias in biases):
            continue
        if not no_bias and len({getattr(value_of(bias), "dtype", None) for bias in biases}) > 1:
            continue
        taken = slice(ends[0][0], ends[-1][1])
        bias = None if no_bias else add_call(graph, first, torch.cat, biases)
        matrices = [add_call(graph, first, operator.getitem, x, taken) for x in (matrix, scale)]
        whole = _multiply(graph, first, [codes, scales, *matrices, bias, "none", None, None, dtype])
        at = 0
        for (start, stop), i in rows:
            columns = (Ellipsis, slice(at, at + stop - start))
            nodes[i].replace_all_uses_with(add_call(graph, first, operator.getitem, whole, columns))
            at += stop - start
        erase(graph, *nodes)


def _is_before(node: Any, other: torch.fx.Node) -> bool:
    return not isinstance(node, torch.fx.Node) or node < other


# --- norm and modulation in front of an activation's quantisation ---


def _sides(node: Any, functions: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Yield the operands of a sum or product in both orders; then (node, None), for a missing operation."""
    if isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in functions:
        if len(node.args) == 2 and not node.kwargs:
            yield node.args
            yield node.args[::-1]
    yield node, None


def _norm_of(node: Any) -> tuple[Any, str, Any, Any, float] | None:
    """Return (input, kind, weight, bias, eps) of a norm over the last dimension; None for any other node."""
    if not isinstance(node, torch.fx.Node) or node.op != "call_function":
        return None
    if node.target is F.layer_norm:
        names: tuple[str, ...] = ("input", "normalized_shape", "weight", "bias", "eps")
        kind, defaults = "layer", {"weight": None, "bias": None, "eps": 1e-5}
    elif node.target in (F.rms_norm, torch.rms_norm):
        names, kind = ("input", "normalized_shape", "weight", "eps"), "rms"
        defaults = {"weight": None, "eps": None}
    else:
        return None
    given: dict[str, Any] = defaults | dict(zip(names, node.args, strict=False)) | node.kwargs
    x, shape = value_of(given.get("input")), given.get("normalized_shape")
    if x is None or x.dtype not in FLOATS or not 2 <= x.dim() <= 4 or tuple(shape or ()) != tuple(x.shape[-1:]):
        return None
    eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
    return (given["input"], kind, given["weight"], given.get("bias"), eps) if isinstance(eps, (int, float)) else None


def _is_vector(node: Any, shape: torch.Size) -> bool:
    """Return True for None, and for one vector for all tokens or for each sample."""
    x = value_of(node)
    return node is None or (x is not None and is_by_token(x, shape))


def _take_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Let a call of quantize_activation compute the norm and modulation in front of it."""
    x, format, norm, *own, balance, beside = node.args
    y = value_of(x)
    if norm != "none" or node.kwargs or y is None or any(t is not None for t in (*own[:2], *own[3:], beside)):
        return
    for sum_, shift in _sides(_before_casts(x), _ADDS):
        for product, gain in _sides(_before_casts(sum_), _MULTIPLICATIONS):
            product = _before_casts(product)
            found = _norm_of(product)
            if found is None or not (_is_vector(shift, y.shape) and _is_vector(gain, y.shape)):
                continue
            source, kind, weight, bias, eps = found
            source, weight, bias = (_before_casts(t, torch.float32) for t in (source, weight, bias))
            if not is_free(product, node):
                return
            op = torch.ops.sage_kernels.quantize_activation.default
            new = add_call(graph, node, op, source, format, kind, weight, bias, float(eps), gain, shift, balance, None)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            return


def _take_columns(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Let a call of quantize_activation read two tensors without the torch.cat in front of it."""
    x, *rest, beside = node.args
    y = value_of(x)
    if not isinstance(x, torch.fx.Node) or x.target not in patterns.CATS or beside is not None or y is None:
        return
    parts = patterns.joined(x.args, x.kwargs, y.dim())
    if parts is None or len(x.users) > 1:
        return
    values = [value_of(part) for part in parts]
    if any(v is None or v.dtype != y.dtype or 0 in v.shape for v in values) or not is_free(x, node):
        return
    new = add_call(graph, node, torch.ops.sage_kernels.quantize_activation.default, parts[0], *rest, parts[1])
    node.replace_all_uses_with(new)
    erase(graph, node, x)


# --- the ops behind a linear layer ---


def _finish(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Move activation function, gate, residual and casts behind a linear layer into its epilogue."""
    args, chain = _arguments(node), [node]
    shape = value_of(node).shape if value_of(node) is not None else None  # type: ignore[union-attr]
    while shape is not None and len(chain[-1].users) == 1:
        user = next(iter(chain[-1].users))
        if not (_is_nothing(user) or _takes(args, user, chain[-1], shape)):
            break
        chain.append(user)
    if len(chain) == 1 or not is_free(node, chain[-1]):
        return
    last = chain[-1]
    new = _multiply(graph, last, args)
    last.replace_all_uses_with(new)
    erase(graph, *reversed(chain))


def _is_nothing(node: torch.fx.Node) -> bool:
    """Return True for a dropout that returns its input unchanged."""
    return node.target is F.dropout and patterns.drops_nothing(node.args, node.kwargs)


def _takes(args: list[Any], user: torch.fx.Node, node: torch.fx.Node, shape: torch.Size) -> bool:
    """Let a call of quantized_linear do the next operation too, by changing its arguments in place.

    args: of the call. user: the operation on `node`, its result so far, of this shape. Returns False if it can't.
    """
    is_bare = args[_GATE] is None and args[_RESIDUAL] is None
    if user.op == "call_method":
        dtype = _cast(user, node)
        if dtype is None:
            return False
        args[_DTYPE] = dtype
        return True
    if user.op != "call_function":
        return False
    if args[_ACTIVATION] == "none" and is_bare:
        activation = patterns.activation(user.target, user.args, user.kwargs)
        if activation is not None:
            args[_ACTIVATION] = activation
            return True
    for one, other in _sides(user, _MULTIPLICATIONS):
        x = value_of(other)
        if one is node and other is not node and x is not None and is_bare:
            if is_by_token(x, shape):
                args[_GATE], args[_DTYPE] = other, torch.promote_types(args[_DTYPE], x.dtype)
                return True
    for one, other in _sides(user, _ADDS):
        x = value_of(other)
        if one is node and other is not node and x is not None and args[_RESIDUAL] is None and x.dtype in FLOATS:
            if x.shape == shape:
                args[_DTYPE] = torch.promote_types(args[_DTYPE], x.dtype)
                args[_RESIDUAL] = _before_casts(other, torch.float32)  # the op reads any type
                return True
    return False


def _join(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Quantise and multiply in one call, if a single product needs the codes: it saves time on the host."""
    parts = {part.args[1]: part for part in node.users if part.target is operator.getitem}
    users = {user for part in parts.values() for user in part.users}
    if len(parts) != len(node.users) or set(parts) != {0, 1} or len(users) != 1:
        return
    product = users.pop()
    is_product = is_call(product, "quantized_linear") and product.args[:2] == (parts[0], parts[1])
    if not is_product or product.kwargs or node.kwargs or not is_free(node, product):
        return
    others = {x for x in product.all_input_nodes if x not in product.args[:2]}
    if others & {*node.all_input_nodes, *parts.values()}:
        return  # the op does not replay the launches of a call that is given a tensor twice
    op = torch.ops.sage_kernels.dynamic_linear.default
    product.replace_all_uses_with(add_call(graph, product, op, *node.args, *product.args[2:]))
    erase(graph, product, *parts.values(), node)


def _cast(user: torch.fx.Node, node: Any) -> torch.dtype | None:
    """Return the target dtype of a method call that only casts `node`; None for any other call."""
    if user.args[0] is not node or user.kwargs:
        return None
    if user.target in _CASTS and len(user.args) == 1:
        return _CASTS[str(user.target)]
    value, before = value_of(user), value_of(node)
    if user.target == "to" and len(user.args) == 2 and user.args[1] in FLOATS:
        return user.args[1]  # type: ignore[return-value]
    if user.target == "type_as" and len(user.args) == 2 and value is not None and before is not None:
        return value.dtype if value.device == before.device and value.dtype in FLOATS else None
    return None


def _before_casts(node: Any, to: torch.dtype | None = None) -> Any:
    """Return the input of a chain of casts between floating point types.

    to: follow only casts to this type. Casts to fp32 change no number; skipping others skips a rounding.
    """
    while isinstance(node, torch.fx.Node) and node.op == "call_method" and isinstance(node.args[0], torch.fx.Node):
        before, dtype = value_of(node.args[0]), _cast(node, node.args[0])
        if dtype is None or before is None or before.dtype not in FLOATS or to not in (None, dtype):
            break
        node = node.args[0]
    return node
