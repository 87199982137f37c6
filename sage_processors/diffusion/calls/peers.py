"""Agreement of processes under context parallelism, on the host, before GPUs send anything.

Processes that disagree about options, versions or shapes would wait for one another in a collective for ever, or
exchange parts that do not fit. So each forward begins with a number from every process, over a group of its own:
a fraction of a millisecond by gloo, and no wait for a GPU. All see the same numbers, so all of them raise, or none.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ...version import __version__
from .context_parallel import degrees


PACKAGES = ("torch", "triton", "diffusers")
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # {group of the devices: ours on the host}


class Peers:
    """Processes that share one denoiser's tokens.

    Args: parallel: diffusers' ParallelConfig. options: a SageAttnProcessor and more that has to be the same, as text.
    """

    def __init__(self, parallel: Any, options: str):
        self.parallel = parallel
        versions = {"sage_processors": __version__} | {name: _version(name) for name in PACKAGES}
        self._fixed = versions | {"options": options, "degrees (ulysses, ring)": list(degrees(parallel))}
        group = parallel.context_parallel_config._flattened_mesh.get_group()
        if group not in _groups:
            ranks = dist.get_process_group_ranks(group)
            _groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._group = _groups[group]

    def numbers(self, number: int) -> list[int]:
        """Return the number that each process gave, in the same order on all. Waits for the other hosts."""
        given = torch.tensor([number], dtype=torch.int64, device="cpu")
        found = [torch.empty_like(given) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(found, given, group=self._group)
        return [int(x) for x in found]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ValueError, on all processes, if options, versions, or shapes of a forward's inputs differ."""
        facts = self._fixed | dict(_shapes((*enumerate(args), *kwargs.items()), "argument"))
        text = json.dumps(facts)
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        if len(set(self.numbers(int.from_bytes(digest, "big")))) == 1:
            return
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, text, group=self._group)
        every = [json.loads(x) for x in told]
        names = dict.fromkeys(name for x in every for name in x)
        name = next(name for name in names if any(x.get(name) != every[0].get(name) for x in every))
        got = ", ".join(f"{x.get(name)} in process {i}" for i, x in enumerate(every))
        raise ValueError(
            f"{name}: got {got}, expected the same in all processes that share a model's tokens; nothing was sent yet"
        )


def parallel_of(layers: Iterable[Any]) -> Any:
    """Return the ParallelConfig of a denoiser; None without context parallelism. layers: its Layers."""
    for layer in layers:
        found = getattr(layer.module.processor, "_parallel_config", None)
        if found is not None:
            return None if found.context_parallel_config is None else found
    return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _shapes(named: Iterable[tuple[Any, Any]], prefix: str) -> Iterator[tuple[str, list[Any]]]:
    """Yield (name, [shape, dtype]) of each tensor in nested arguments."""
    for name, value in named:
        if isinstance(value, torch.Tensor):
            yield f"{prefix} {name}", [list(value.shape), str(value.dtype)]
        elif isinstance(value, (list, tuple, dict)):
            yield from _shapes(value.items() if isinstance(value, dict) else enumerate(value), f"{prefix} {name}")
