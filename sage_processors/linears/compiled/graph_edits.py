"""Helpers of passes over Dynamo's graphs: values, calls of ops, writes in place, new nodes."""

from __future__ import annotations

import inspect
import operator
import re
from typing import Any

import torch


# Dynamo's names of our own tensors that a forward writes to: attributes of processors and of swapped layers
_OWN = re.compile(r"_sage_(events|sites|linear|probe)_")


def is_call(node: Any, name: str) -> bool:
    """Return True for a call of the op sage_kernels::name."""
    op = getattr(torch.ops.sage_kernels, name)
    return isinstance(node, torch.fx.Node) and node.op == "call_function" and node.target in (op, op.default)


def calls_of(graph: torch.fx.Graph, name: str) -> list[torch.fx.Node]:
    """Return all calls of the op sage_kernels::name, in the order of the graph."""
    return [node for node in graph.nodes if is_call(node, name)]


def value_of(node: Any) -> torch.Tensor | None:
    """Return the fake tensor that Dynamo traced with (shape and dtype, no numbers), or None."""
    found = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def add_call(graph: torch.fx.Graph, before: torch.fx.Node, target: Any, *args: Any) -> torch.fx.Node:
    """Insert a call in front of a node and return it."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    given: list[Any] = []
    torch.fx.node.map_arg(args, given.append)
    if all("example_value" in x.meta for x in given):
        values = torch.fx.node.map_arg(args, lambda x: x.meta["example_value"])
        with torch.no_grad():
            node.meta["example_value"] = target(*values)
    return node


def erase(graph: torch.fx.Graph, *nodes: torch.fx.Node) -> None:
    """Erase those of the nodes that have no users left. Pass the last node of the graph first."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)


def written_by(node: torch.fx.Node) -> list[Any]:
    """Return the nodes that a call may write to.

    Of a function without a schema this is the first argument, if its name says that it works in place.
    """
    if node.op == "call_method":
        name = str(node.target)
        return [node.args[0]] if name.endswith("_") and not name.endswith("__") else []
    if node.op != "call_function":
        return list(node.args) if node.op == "call_module" else []
    if any(kind.__name__ == "HigherOrderOperator" for kind in type(node.target).__mro__):
        return [node]  # it runs a graph or kernel of its own, which may write to anything
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
    """Return True if a function is called with inplace=True, by name or by position."""
    if "inplace" in node.kwargs:
        return bool(node.kwargs["inplace"])
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin, or an op: its schema tells
        return False
    return bool(given.arguments.get("inplace"))


_IN_PLACE = frozenset(name for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:]))


def is_own(x: Any) -> bool:
    """Return True for a counter or statistic of ours, or a part of one. No layer reads it as its input."""
    while isinstance(x, torch.fx.Node) and x.target is operator.getitem:
        x = x.args[0]
    return isinstance(x, torch.fx.Node) and x.op in ("placeholder", "get_attr") and bool(_OWN.search(str(x.target)))


def is_free(first: torch.fx.Node, last: torch.fx.Node) -> bool:
    """Return True if no tensor that a layer may read is written to between two nodes."""
    node = first.next
    while node is not last and node.op != "root":
        if any(x is not None and not is_own(x) for x in written_by(node)):
            return False
        node = node.next
    return node is last
