"""One bar for work of many parts, drawn by rich; nothing where none is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(enabled: bool) -> Iterator[Callable]:
    """Yields show(label, steps) -> on_step."""
    if not enabled:
        yield lambda label, steps: None
        return
    try:
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("the progress bar needs rich: pip install sage-processors, or progress=False") from error
    with Progress() as bar:
        task = bar.add_task("stock attention", total=None)

        def show(label, steps):
            bar.reset(task, description=label, total=steps)
            return lambda: bar.advance(task)

        yield show
