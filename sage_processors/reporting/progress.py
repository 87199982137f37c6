"""One progress bar of rich for work in several stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bar(enabled: bool, first: str = "") -> Iterator[Callable[[str, int], Callable[[], Any] | None]]:
    """Show one progress bar (rich) for work in several stages.

    Args: first: label before the first stage.
    Yields: show(label, steps), which starts a stage and returns on_step, to be called after each of its steps. If the
        bar is not enabled, it returns None.
    Raises: ImportError without rich.
    """
    if not enabled:
        yield lambda label, steps: None
        return
    try:
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError("the progress bar needs rich: pip install sage-processors, or progress=False") from error
    with Progress() as bar:
        task = bar.add_task(first, total=None)

        def show(label: str, steps: int) -> Callable[[], Any]:
            bar.reset(task, description=label, total=steps)
            return lambda: bar.advance(task)

        yield show
