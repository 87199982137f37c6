"""In compiled code: norms, projections of one input and what follows a linear layer, in one call of an op each.

Works on the graph as Dynamo writes it, where norms and activation functions are still calls of theirs. Nothing is
moved across a write in place.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .lazy import is_by_token


# What of ours a forward writes to, as Dynamo names it: attributes of processors and of swapped layers
_OWN = re.compile(r"_sage_(events|sites|linear|probe)_")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_ADDS, _MULTIPLICATIONS = (operator.add, torch.add), (operator.mul, torch.mul)
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
# what a call of quantized_linear has after codes and scales: bias, activation, gate, residual, dtype
_BIAS, _ACTIVATION, _GATE, _RESIDUAL, _DTYPE = range(4, 9)


def fuse(graph: torch.fx.Graph) -> None:
    """Put together what the ops can do at once: the same numbers but for fewer roundings in between."""
    _share(graph)
    _merge(graph)
    for node in _calls(graph, "quantize_activation"):
        _take_norm(graph, node)
    for node in _calls(graph, "quantize_activation"):
        _take_columns(graph, node)
    for node in _calls(graph, "quantized_linear"):
        _finish(graph, node)
    graph.lint()


def _is(node: Any, name: str) -> bool:
    op = getattr(torch.ops.sage_kernels, name)
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in (op, op.default)


def _calls(graph: torch.fx.Graph, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if _is(node, name)]


def _value(node: Any) -> torch.Tensor | None:
    """The tensor that Dynamo traced with: shape and dtype, no numbers."""
    found = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _add(graph: torch.fx.Graph, before: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
    """A new call in front of a node."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    given: list[Any] = []
    torch.fx.node.map_arg(args, given.append)
    if all("example_value" in x.meta for x in given):
        values = torch.fx.node.map_arg(args, lambda x: x.meta["example_value"])
        with torch.no_grad():
            node.meta["example_value"] = target(*values)
    return node


def _erase(graph: torch.fx.Graph, *nodes: torch.fx.Node) -> None:
    """Erase nodes, the last ones first, that nobody uses any more."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)


# writes in place


def _written(node: torch.fx.Node) -> list[Any]:
    """What a call may write to. Of a function that isn't known: what it is called with, if its name says so."""
    if node.op == "call_method":
        name = str(node.target)
        return [node.args[0]] if name.endswith("_") and not name.endswith("__") else []
    if node.op != "call_function":
        return list(node.args) if node.op == "call_module" else []
    if any(kind.__name__ == "HigherOrderOperator" for kind in type(node.target).__mro__):
        return [node]  # a graph or a kernel of its own, which may write to anything
    if node.kwargs.get("out") is not None or _asks_in_place(node):
        return [node.kwargs.get("out"), *node.args[:1]]
    op = getattr(node.target, "default", node.target)
    schema = getattr(op, "_schema", None)
    if schema is not None:
        given = [*node.args, *(node.kwargs.get(a.name) for a in schema.arguments[len(node.args) :])]
        pairs = zip(schema.arguments, given, strict=False)
        return [x for argument, x in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator":  # and_ and or_ write to nothing
        in_place = name == "setitem" or name in _IN_PLACE
    else:
        in_place = name.endswith("_") and not name.endswith("__")
    return list(node.args[:1]) if in_place else []


def _asks_in_place(node: torch.fx.Node) -> bool:
    """Whether a function is called with inplace=True, by name or by place."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin, or an op: its schema tells
        return False
    return bool(given.arguments.get("inplace"))


_IN_PLACE = frozenset(name for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:]))


def _is_own(x: Any) -> bool:
    """Whether a tensor is a counter or a statistic of ours, or a part of one: no layer reads it as its input."""
    while isinstance(x, torch.fx.Node) and x.target is operator.getitem:
        x = x.args[0]
    return isinstance(x, torch.fx.Node) and x.op in ("placeholder", "get_attr") and bool(_OWN.search(str(x.target)))


def _is_free(first: torch.fx.Node, last: torch.fx.Node) -> bool:
    """Whether nothing that a layer may read is written to from one node to the other."""
    node = first.next
    while node is not last and node.op != "root":
        if any(x is not None and not _is_own(x) for x in _written(node)):
            return False
        node = node.next
    return node is last


# one quantisation an activation, one matmul for projections of it


def _share(graph: torch.fx.Graph) -> None:
    """One call of quantize_activation for calls of the same arguments."""
    known: dict[Any, torch.fx.Node] = {}
    for node in _calls(graph, "quantize_activation"):
        first = known.get(node.args)
        if first is None or not _is_free(first, node):
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
        # the parts of the first call are in front of all that used the other one's
        _erase(graph, node)


def _rows_of(node: Any) -> tuple[Any, int, int] | None:
    """(matrix, start, stop) of some of its rows; None for anything else."""
    if (
        not isinstance(node, torch.fx.Node)
        or node.target is not operator.getitem
        or not isinstance(node.args[1], slice)
    ):
        return None
    rows = node.args[1]
    whole = isinstance(rows.start, int) and isinstance(rows.stop, int) and rows.step is None
    return (node.args[0], rows.start, rows.stop) if whole else None


def _merge(graph: torch.fx.Graph) -> None:
    """One matmul for layers of one input whose weights lie one after the other in one matrix."""
    groups: dict[Any, list[torch.fx.Node]] = {}
    for node in _calls(graph, "quantized_linear"):
        weight, scale = _rows_of(node.args[2]), _rows_of(node.args[3])
        is_plain = node.args[_ACTIVATION] == "none" and node.args[_GATE] is None and node.args[_RESIDUAL] is None
        if weight is not None and scale is not None and weight[1:] == scale[1:] and is_plain:
            key = (*node.args[:2], weight[0], scale[0], node.args[_BIAS] is None, node.args[_DTYPE])
            groups.setdefault(key, []).append(node)
    for (codes, scales, matrix, scale, no_bias, dtype), nodes in groups.items():
        first, last = nodes[0], nodes[-1]
        parts = [_rows_of(node.args[2]) for node in nodes]
        rows = sorted((part[1:], i) for i, part in enumerate(parts) if part is not None)
        ends = [at for at, _ in rows]
        if len(nodes) == 1 or any(a[1] != b[0] for a, b in zip(ends, ends[1:], strict=False)):
            continue
        biases = [nodes[i].args[_BIAS] for _, i in rows]
        if not _is_free(first, last) or not all(no_bias or _is_before(bias, first) for bias in biases):
            continue
        if not no_bias and len({getattr(_value(bias), "dtype", None) for bias in biases}) > 1:
            continue
        taken = slice(ends[0][0], ends[-1][1])
        bias = None if no_bias else _add(graph, first, torch.cat, biases)
        matrices = [_add(graph, first, operator.getitem, x, taken) for x in (matrix, scale)]
        op = torch.ops.sage_kernels.quantized_linear.default
        whole = _add(graph, first, op, codes, scales, *matrices, bias, "none", None, None, dtype)
        at = 0
        for (start, stop), i in rows:
            columns = (Ellipsis, slice(at, at + stop - start))
            nodes[i].replace_all_uses_with(_add(graph, first, operator.getitem, whole, columns))
            at += stop - start
        _erase(graph, *nodes)


def _is_before(node: Any, other: torch.fx.Node) -> bool:
    return not isinstance(node, torch.fx.Node) or node < other


# norm and modulation in front of an activation's quantisation


def _sides(node: Any, functions: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """(one, other) of a sum or product of two, both ways round; then (node, None)."""
    if isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in functions:
        if len(node.args) == 2 and not node.kwargs:
            yield node.args
            yield node.args[::-1]
    yield node, None


def _norm_of(node: Any) -> tuple[Any, str, Any, Any, float] | None:
    """(input, kind, weight, bias, eps) of a norm over the last dimension."""
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
    x, shape = _value(given.get("input")), given.get("normalized_shape")
    if x is None or x.dtype not in _FLOATS or not 2 <= x.dim() <= 4 or tuple(shape or ()) != tuple(x.shape[-1:]):
        return None
    eps = torch.finfo(x.dtype).eps if given["eps"] is None else given["eps"]
    return (given["input"], kind, given["weight"], given.get("bias"), eps) if isinstance(eps, (int, float)) else None


def _is_vector(node: Any, shape: torch.Size) -> bool:
    """Whether it is None or one vector for all tokens, or for each sample's."""
    x = _value(node)
    return node is None or (x is not None and x.dtype in _FLOATS and is_by_token(x, shape))


def _take_norm(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    x, format, norm, *own, balance, beside = node.args
    y = _value(x)
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
            if not _is_free(product, node):
                return
            op = torch.ops.sage_kernels.quantize_activation.default
            new = _add(graph, node, op, source, format, kind, weight, bias, float(eps), gain, shift, balance, None)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            return


def _take_columns(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Columns of two tensors that are only put beside each other to be quantised are read from where they are."""
    x, *rest, beside = node.args
    y = _value(x)
    is_cat = isinstance(x, torch.fx.Node) and x.op == "call_function" and x.target in (torch.cat, torch.concat)
    if not is_cat or beside is not None or y is None or len(x.users) > 1:  # type: ignore[union-attr]
        return
    given = dict(zip(("tensors", "dim"), x.args, strict=False)) | x.kwargs  # type: ignore[union-attr]
    parts, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim not in (-1, y.dim() - 1) or "out" in given:
        return
    values = [_value(part) for part in parts]
    if any(v is None or v.dtype != y.dtype or 0 in v.shape for v in values) or not _is_free(x, node):  # type: ignore
        return
    new = _add(graph, node, torch.ops.sage_kernels.quantize_activation.default, parts[0], *rest, parts[1])
    node.replace_all_uses_with(new)
    _erase(graph, node, x)  # type: ignore[arg-type]


# what follows a linear layer


def _finish(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Activation function, gate, residual and casts behind a linear layer, in its own last pass."""
    args, chain = list(node.args), [node]
    shape = _value(node).shape if _value(node) is not None else None  # type: ignore[union-attr]
    while shape is not None and len(chain[-1].users) == 1:
        user = next(iter(chain[-1].users))
        if not (_is_nothing(user) or _takes(args, user, chain[-1], shape)):
            break
        chain.append(user)
    if len(chain) == 1 or not _is_free(node, chain[-1]):
        return
    last = chain[-1]
    new = _add(graph, last, torch.ops.sage_kernels.quantized_linear.default, *args)
    last.replace_all_uses_with(new)
    _erase(graph, *reversed(chain))


def _is_nothing(node: torch.fx.Node) -> bool:
    """Whether it is a dropout that drops nothing."""
    if node.target is not F.dropout:
        return False
    given: dict[str, Any] = {"p": 0.5, "training": True, "inplace": False}
    given |= dict(zip(("input", *given), node.args, strict=False)) | node.kwargs
    return given["inplace"] is False and (given["p"] == 0 or given["training"] is False)


def _takes(args: list[Any], user: torch.fx.Node, node: torch.fx.Node, shape: torch.Size) -> bool:
    """Whether the op can do what `user` does with the layer's result `node`; its arguments are then changed."""
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
        activation = _activation(user)
        if activation is not None:
            args[_ACTIVATION] = activation
            return True
    for one, other in _sides(user, _MULTIPLICATIONS):
        x = _value(other)
        if one is node and other is not node and x is not None and is_bare and x.dtype in _FLOATS:
            if is_by_token(x, shape):
                args[_GATE], args[_DTYPE] = other, torch.promote_types(args[_DTYPE], x.dtype)
                return True
    for one, other in _sides(user, _ADDS):
        x = _value(other)
        if one is node and other is not node and x is not None and args[_RESIDUAL] is None and x.dtype in _FLOATS:
            if x.shape == shape:
                args[_DTYPE] = torch.promote_types(args[_DTYPE], x.dtype)
                args[_RESIDUAL] = _before_casts(other, torch.float32)  # the op reads any type
                return True
    return False


def _activation(node: torch.fx.Node) -> str | None:
    if node.target is F.gelu:
        approximate = node.args[1] if len(node.args) > 1 else node.kwargs.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(approximate))
    in_place = node.args[1] if len(node.args) > 1 else node.kwargs.get("inplace", False)
    return "silu" if node.target is F.silu and in_place is False else None


def _cast(user: torch.fx.Node, node: Any) -> torch.dtype | None:
    """The dtype of a call of a tensor's method that only casts it, or None."""
    if user.args[0] is not node or user.kwargs:
        return None
    if user.target in _CASTS and len(user.args) == 1:
        return _CASTS[str(user.target)]
    value, before = _value(user), _value(node)
    if user.target == "to" and len(user.args) == 2 and user.args[1] in _FLOATS:
        return user.args[1]  # type: ignore[return-value]
    if user.target == "type_as" and len(user.args) == 2 and value is not None and before is not None:
        return value.dtype if value.device == before.device and value.dtype in _FLOATS else None
    return None


def _before_casts(node: Any, to: torch.dtype | None = None) -> Any:
    """What a node casts, through all casts between floating point types, or those to one type. What is cast to fp32 is
    the same number before; what is cast to a smaller type loses a rounding."""
    while isinstance(node, torch.fx.Node) and node.op == "call_method" and isinstance(node.args[0], torch.fx.Node):
        before, dtype = _value(node.args[0]), _cast(node, node.args[0])
        if dtype is None or before is None or before.dtype not in _FLOATS or to not in (None, dtype):
            break
        node = node.args[0]
    return node
