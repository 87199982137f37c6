"""Run a function when a module of another package has been loaded, without importing that package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder


class _ReportingLoader(Loader):
    def __init__(self, loader, callback):
        self._loader, self._callback = loader, callback

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader  # restored for inspect and importlib.reload
        self._loader.exec_module(module)
        self._callback()


class _Finder(MetaPathFinder):
    def __init__(self, module: str, callback):
        self.module, self.callback = module, callback

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ReportingLoader(spec.loader, self.callback)
        return spec


def when_imported(module: str, callback: Callable[[], None], *, ready: str) -> None:
    """Call `callback()` when `module` has been imported: now, or right after a later import.

    Args:
        module: full dotted name.
        callback: registered only once for each module.
        ready: a name that the module defines near its end. A loaded module without it is still being imported.
    """
    loaded = sys.modules.get(module)
    if loaded is not None and hasattr(loaded, ready):
        callback()
        return
    waiting = (finder for finder in sys.meta_path if isinstance(finder, _Finder))
    if not any(finder.module == module and finder.callback is callback for finder in waiting):
        sys.meta_path.insert(0, _Finder(module, callback))
