"""Gradients of a training step as one CUDA graph: one launch instead of thousands of small kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch


WARM_UP = 3  # eager steps before a capture: they compile kernels, and cuDNN chooses among its own
Run = Callable[[], torch.Tensor]
Recorded = tuple[torch.Tensor, list["torch.Tensor | None"], Callable[[], None]]


class GraphedStep:
    """Calls `loss(**inputs)`, and leaves its gradients in the parameters' `grad`; returns the loss, detached.

    With `record` (`cuda_graph`) each kind of inputs (their shapes) is captured when it first comes, and later calls
    copy theirs into the captured ones and replay. What `loss` reads of anything else is frozen, but for what is
    changed in place, as optimizers change weights. Where capturing raises, a line says so; `simpler`, if given, is
    called once, to undo what may stand in the way, and it is tried again. After that all steps are eager.

    Loss and gradients are those of the newest call: the next one overwrites them.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        loss: Callable[..., torch.Tensor],
        record: Callable[[Run, Sequence[torch.nn.Parameter]], Recorded] | None = None,
        simpler: Callable[[], None] | None = None,
    ):
        self.parameters, self.loss, self.record, self.simpler = list(parameters), loss, record, simpler
        self._captured: dict[tuple, tuple[dict[str, torch.Tensor], Recorded]] = {}

    def __call__(self, **inputs: torch.Tensor) -> torch.Tensor:
        kind = tuple((name, tuple(value.shape), value.dtype) for name, value in inputs.items())
        while self.record is not None and kind not in self._captured:
            self._capture(kind, inputs)
        if self.record is None:
            return self._run(inputs)
        static, (loss, gradients, replay) = self._captured[kind]
        for name, value in inputs.items():
            static[name].copy_(value)
        replay()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def _capture(self, kind: tuple, inputs: dict[str, torch.Tensor]) -> None:
        began = time.monotonic()
        static = {name: value.clone() for name, value in inputs.items()}
        try:
            self._captured[kind] = static, self.record(lambda: self._run(static), self.parameters)
            shape = "x".join(map(str, next(iter(static.values())).shape))
            print(f"captured a step of {shape} in {time.monotonic() - began:.1f} s", flush=True)
        except Exception as error:
            then = "a simpler step" if self.simpler else "eager steps from here on"
            print(f"no CUDA graph, {then}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            self._captured.clear()
            if self.simpler:
                self.simpler()
                self.simpler = None
            else:
                self.record = None

    def _run(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        for parameter in self.parameters:
            parameter.grad = None
        loss = self.loss(**inputs)
        loss.backward()
        return loss.detach()


def cuda_graph(run: Run, parameters: Sequence[torch.nn.Parameter]) -> Recorded:
    """Capture `run`, which leaves gradients in `parameters` and returns a loss: (loss, gradients, replay).

    Warming up and capturing share a stream, which gradients that outlive a step would otherwise be tied to. Nothing in
    `run` may wait for the device, copy from the host, or draw random numbers.
    """
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.synchronize()
    for parameter in parameters:
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            loss = run()
    finally:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own
    torch.cuda.synchronize()
    return loss, [parameter.grad for parameter in parameters], graph.replay
