"""One progress bar of rich for work in several stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..installation import pip_install


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
        raise ImportError(f"the progress bar needs rich, or progress=False: {pip_install()}") from error
    with Progress() as bar:
        task = bar.add_task(first, total=None)

        def show(label: str, steps: int) -> Callable[[], Any]:
            bar.reset(task, description=label, total=steps)
            return lambda: bar.advance(task)

        yield show
