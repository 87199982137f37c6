"""Time forwards of whole models, stock and in INT8, with rows of suite end_to_end.

    python kernels/benchmarks/bench_end_to_end.py                         # every case, about four minutes on an H200
    python kernels/benchmarks/bench_end_to_end.py --tiny --device cpu --csv rows.csv
    python kernels/benchmarks/bench_end_to_end.py --case llama8b_prefill_131072 --fast
    python kernels/benchmarks/bench_end_to_end.py --case flux_1024 --called compiled
    python kernels/benchmarks/bench_end_to_end.py --case flux_1024 --called cuda_graph  # or compiled_graphs
    python kernels/benchmarks/bench_end_to_end.py --case flux_1024 --called captured --together 4
    python kernels/benchmarks/bench_end_to_end.py --case wan21_1_3b_480p81 --skip 50 --recipe qk_int8_pv_fp8
    … --skip 50 --compensate --linears int8 --called captured             # with everything that "fast" has

Models have random weights and true shapes. The wall time of a whole forward is measured, with a sync at its end.
Providers of a case run one after the other in one process, cuDNN first and last, since a GPU that has been busy is
slower; `--rounds 4` repeats this four times. A forward that met a slow host is timed again (host_speed.py). A provider
gets no rows if most of its forwards did. Ours is `apply` with timestep scaling for denoisers, after a warm-up, each
forward one denoising step further. In language models attention without rotation, and with `--linears` all linear
layers, are put into 8 bit by hand; `--fast` times what `apply` with the preset makes of the model. Calls of ours that
stay in 16 bit run on the back end that ours is compared with. `attention_removed` returns the queries: no attention
can be faster.

`--called` times denoisers in other ways: under torch.inference_mode(); with repeated blocks compiled, as diffusers
advises; with a CUDA graph of each compiled block (`compiled_graphs`); with the whole forward from a CUDA graph, whose
inputs are copied into place for every replay (`captured`: ours with graphs="auto"). With `--together 4` the host waits
for the GPU after every fourth forward only, as a pipeline waits at the end: Python's work for a forward then overlaps
the GPU's work on the forward before. Times are per forward.

`--rival torchao_int8` measures stock attention with linear layers that another package quantised, the same layers as
ours (rival_linears.py); `--rival sageattention_2` measures another package's attention in place of all of stock's
(rival_attention.py). Both are checked against stock as ours is.

`--skip 50` leaves out that percentage of the key tiles of the largest attention, at random. It shows the speed of
`skip` at that share, since models with random weights have no tiles worth skipping. The lists stay the same
and nothing is measured for them, which bench_skip.py times. Ours is then checked against the same model with 16-bit
attention to the same tiles (metric rel_l1_same_tiles; rel_l2_error likewise). Times are compared with stock attention,
which leaves out nothing.
"""

from __future__ import annotations

import gc
import statistics
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from applied_language import by_apply, by_hand
from cuda_graphs import replayed
from end_to_end_options import GRAPHS, chosen_cases, parse
from host_speed import HostSpeed
from model_cases import ModelCase, make_inputs, make_model
from random_lists import Shape, check_share, give_lists, listed_attention, random_lists
from replaced_attention import attention_removed
from rival_attention import ATTENTION_RIVALS, bound, imported, rival_attention
from rival_linears import RIVALS, rival_linears
from torch.nn.attention import SDPBackend, sdpa_kernel

import sage_processors as sp
from sage_kernels.facts.crossover import is_short
from sage_kernels.results import append_row, check_appendable
from sage_kernels.testing import relative_l2
from sage_processors.linears.weights.layers import choose


RESULTS = Path(__file__).resolve().parent / "results.csv"
# Relative L1 of the model's output against stock attention's. At full depth and a quarter of the width, on a CPU in
# bf16, INT8 has 0.012 (Wan) to 0.031 (SDXL), and removed attention 0.97 and more.
MAX_ERROR = 0.08
# Forwards before the first timed one, in which kernels compile: the first has no plan, the second makes one, the
# fourth keeps row maxima (8-bit P) and the fifth reads them.
WARM_UP = 5
COMPILES = ("compiled", "compiled_graphs")
COMPILER = "inductor"
OURS, REMOVED = "sage_kernels", "attention_removed"
BACKENDS = {"torch_sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "torch_sdpa_flash": SDPBackend.FLASH_ATTENTION}


class Gated(Exception):
    """Raised for a result that must not become a row."""


class Measured(NamedTuple):
    """Result of one provider.

    Attributes:
        times: of the forwards, ms. slow: number of forwards with a slow host. peak: memory in GiB; None on a CPU.
        output: of the last forward.
    """

    times: list[float]
    slow: int
    peak: float | None
    output: torch.Tensor


@contextmanager
def compiled_blocks(model, *, graphs: bool = False):
    """Compile repeated blocks inside of the with-statement: those diffusers names, or all in module lists.

    Args: graphs: with a CUDA graph of each block, recorded by the compiler.
    """
    torch.compiler.reset()
    mode = {"mode": "reduce-overhead"} if graphs else {}
    if getattr(model, "_repeated_blocks", None):
        model.compile_repeated_blocks(fullgraph=True, backend=COMPILER, **mode)
    else:
        for block in (x for blocks in model.modules() if isinstance(blocks, torch.nn.ModuleList) for x in blocks):
            block.compile(backend=COMPILER, **mode)
    try:
        yield
    finally:
        for module in model.modules():
            module._compiled_call_impl = None
        torch.compiler.reset()


def held_to(provider: str, device):
    """Restrict SDPA to one back end; no change on a CPU, which has none of them."""
    return sdpa_kernel(BACKENDS[provider]) if device.type == "cuda" else nullcontext()


class Bench:
    """One case on one model. Providers are measured in the order of `providers`."""

    def __init__(
        self, case: ModelCase, model, device, dtype, *, recipe, min_tokens, reps, called="eager", linears="none",
        min_features=None, fast=False, skip=0, compensates=False, rounds=1, together=1, rivals=None,
    ):  # fmt: skip
        self.case, self.model, self.device, self.dtype = case, model, device, dtype
        self.recipe, self.min_tokens, self.reps, self.called = recipe, min_tokens, reps, called
        self.linears, self.min_features, self.fast = linears, min_features, fast
        self.lists, self.skip, self.rounds, self.together, self.rivals = None, skip, rounds, together, rivals or {}
        self.forwards, self.host = 0, HostSpeed(matters=device.type == "cuda" and called != "cuda_graph")  # one launch
        if skip:
            sizes = case.attention()
            self.shape = Shape(*(sizes[name] for name in ("batch", "heads", "seq_q", "seq_kv", "head_dim")))
            self.lists = random_lists(self.shape, skip / 100, recipe, device, compensates)
        self.int8_calls = None  # attention and linear calls in 8 bit, once ours has run
        self.redone = None  # largest share of a layer's query tiles computed again, once ours has run

    @property
    def full_recipe(self) -> str:
        """Recipe of attention, and of linear layers if they run in 8 bit; or the preset's name."""
        if self.fast:
            return "preset_fast"
        return self.recipe if self.linears == "none" else f"{self.recipe}+linears_{self.linears}"

    def providers(self):
        """Yield (provider, function that measures it), cuDNN first and, with several forwards, last too."""
        backends = [name for name in BACKENDS if not self.case.is_denoiser or name == "torch_sdpa_cudnn"]
        for _ in range(self.rounds):
            for name in backends:
                yield name, partial(self.stock, name)
            yield REMOVED, self.removed
            yield OURS, self.ours_denoiser if self.case.is_denoiser else self.ours_language
            for name in self.rivals:
                yield name, partial(self.rival, name)
        if self.reps > 1:
            yield "torch_sdpa_cudnn", partial(self.stock, "torch_sdpa_cudnn")

    def stock(self, provider: str) -> Measured:
        with held_to(provider, self.device):
            # stock attention compiles nothing and needs no long warm-up: a forward may take 17 s
            return self.measure(1 if provider == "torch_sdpa_cudnn" or self.reps > 1 else 0)

    def removed(self) -> Measured:
        with attention_removed():
            return self.measure(1 if self.reps > 1 else 0)

    def rival(self, name: str) -> Measured:
        if self.rivals[name] is not None:
            with rival_attention(self.rivals[name], self.model), held_to("torch_sdpa_cudnn", self.device):
                return self.measure(1)
        choices = choose(self.model, label=str, linears="int8", min_features=self.min_features)
        layers = [choice.module for choice in choices if choice.format != "none"]
        if not layers:
            raise Gated(f"no linear layer that is worth 8 bit for {name}")
        try:
            with rival_linears(name, layers), held_to("torch_sdpa_cudnn", self.device):
                return self.measure(1)
        except (ImportError, AssertionError) as error:  # not installed; torchao's check of the GPU
            raise Gated(f"{name} does not run here: {error}") from error

    def ours_denoiser(self) -> Measured:
        options = sp.SageAttnProcessor(
            recipe=self.recipe,
            min_tokens=self.min_tokens,
            linears=sp.Linears(self.linears, min_features=self.min_features),
            graphs="auto" if self.called == "captured" else "off",  # captures in the sixth forward
        )
        with sp.apply(self.model, options) as handle, held_to("torch_sdpa_cudnn", self.device):
            before = self.forwards
            if self.lists is not None:
                give_lists(handle, self.shape, self.lists)
            result = self.measure(WARM_UP + (self.called == "captured"), handle.new_run)
            self.check_report(handle.report(), self.forwards - before)
        return result

    def ours_language(self) -> Measured:
        before, forwards = sp.attention_report(self.model), self.forwards
        options = {"min_tokens": self.min_tokens, "min_features": self.min_features}
        way = (by_apply,) if self.fast else (by_hand, self.recipe, self.linears)
        with way[0](self.model, *way[1:], **options), held_to("torch_sdpa_cudnn", self.device):
            result = self.measure(1)
            self.check_report(sp.attention_report(self.model), self.forwards - forwards, before)
        return result

    def expected(self, stock: torch.Tensor) -> torch.Tensor:
        """Return the output to check ours against: stock's, or 16-bit attention's to the visited tiles."""
        if self.lists is None:
            return stock
        with listed_attention(self.shape, self.lists):
            return self._forward(self.inputs(WARM_UP + self.reps * self.together - 1))

    def measure(self, warm_up: int, new_run=lambda: None) -> Measured:
        """Time forwards from step WARM_UP on, after `warm_up` forwards at the steps before."""
        compiles, graphs = self.called in COMPILES, self.called == "compiled_graphs"
        with compiled_blocks(self.model, graphs=graphs) if compiles else nullcontext():
            new_run()
            with torch.inference_mode() if self.called == "inference_mode" else nullcontext():
                # CUDA graphs of blocks are recorded in the third forward
                return self._measure(WARM_UP if compiles else max(warm_up, int(self.called != "eager")))

    def _measure(self, warm_up: int) -> Measured:
        on_gpu, times, slow, forward = self.device.type == "cuda", [], 0, self._forward
        for step in range(WARM_UP - warm_up, WARM_UP):
            self.finished(forward, [self.inputs(max(step, 0))])
        for step in range(WARM_UP, WARM_UP + self.reps * self.together, self.together):
            inputs = [self.inputs(step + i) for i in range(self.together)]
            if step == WARM_UP:
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats(self.device)
                if self.called in GRAPHS and warm_up <= WARM_UP:  # captured, ours replays by itself
                    forward = replayed(forward, inputs[0])
            self.wait()
            took, is_clean, output = self.host.timed(partial(self.finished, forward, inputs))
            times.append(took / self.together)
            slow += not is_clean
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30 if on_gpu else None
        return Measured(times, slow, peak, output.clone())

    def _forward(self, inputs: dict) -> torch.Tensor:
        self.forwards += 1
        if self.called == "compiled_graphs":  # graphs' memory may be reused from here on
            torch.compiler.cudagraph_mark_step_begin()
        return self.model(**inputs, return_dict=True)[0]

    def inputs(self, step: int) -> dict:
        return make_inputs(self.case, step, self.device, self.dtype)

    def finished(self, forward, inputs: list[dict]) -> torch.Tensor:
        output = [forward(x) for x in inputs][-1]
        self.wait()
        return output

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_report(self, report, forwards: int, before=None) -> None:
        """Raise Gated unless every layer that is worth INT8 ran in INT8 and all other calls were short."""
        calls, exact = report.calls, dict(report.fallbacks)
        if before is not None:  # several cases share the model and its counters
            calls -= before.calls
            exact = {reason: number - before.fallbacks.get(reason, 0) for reason, number in exact.items()}
        sizes = {name: value for name, value in self.case.attention().items() if name != "kv_heads"}
        short = is_short(self.device, **sizes, recipe=self.recipe, min_tokens=self.min_tokens)
        wanted = 0 if short else forwards * self.case.int8_calls()
        self.int8_calls = calls + (0 if report.linears is None else report.linears.calls)
        self.redone = max(row.get("redone_fraction", 0.0) for row in report.rows)
        print(
            f"{self.case.name:32} {OURS:18} INT8 calls {calls}, exact {exact} in {forwards} forwards; "
            f"{self.redone:.1%} of a layer's query tiles were done again at most",
            flush=True,
        )
        if self.lists is not None:
            check_share(report, self.lists, self.shape, self.skip / 100, wanted)
        unmeant = {reason: number for reason, number in exact.items() if number and reason != "short"}
        if calls < wanted or unmeant:
            raise Gated(f"{calls} calls ran in INT8, at least {wanted} should have; not meant to be exact: {unmeant}")


def check_output(output, stock) -> tuple[float, float]:
    """Return relative L1 and L2 of a model's output against the expected one.

    Raises: Gated if L1 is too large.
    """
    output, stock = output.float(), stock.float()
    l1 = float((output - stock).abs().sum() / stock.abs().sum())
    if not l1 <= MAX_ERROR:
        raise Gated(f"relative L1 {l1:.3g} of the output against stock, expected at most {MAX_ERROR}")
    return l1, float(relative_l2(output, stock))


def run_case(bench: Bench, csv: Path | None) -> list[str]:
    """Measure every provider and append its rows. Returns the failures."""
    case, failures, stock, results = bench.case, [], None, {}
    for provider, measure in bench.providers():
        try:
            result = measure()
            errors = None
            if stock is not None and provider != REMOVED:
                errors = check_output(result.output, bench.expected(stock) if provider == OURS else stock)
        except (Gated, RuntimeError, NotImplementedError, ValueError) as error:
            failures.append(f"{case.name} {provider}: {str(error).strip().splitlines()[0]}")
            print(f"FAILED {failures[-1]}", flush=True)
            results.pop(provider, None)  # drops its results of earlier rounds too
            continue
        if stock is None:
            stock = result.output
        if provider in results:  # of an earlier round
            earlier, errors = results[provider]
            result = earlier._replace(times=earlier.times + result.times, slow=earlier.slow + result.slow)
        results[provider] = result, errors
    cudnn = results["torch_sdpa_cudnn"][0].times if "torch_sdpa_cudnn" in results else None
    for provider, (result, errors) in results.items():
        median = statistics.median(result.times)
        is_stock = provider == OURS and not bench.int8_calls  # nothing of ours ran: a ratio would be noise
        ratio = None if cudnn is None or is_stock else statistics.median(cudnn) / median
        said = "no call ran in INT8" if is_stock else "" if ratio is None else f"{ratio:.3f}x"
        print(
            f"{case.name:32} {provider:18} {median:10.2f} ms  {said}"
            f"  {'' if result.peak is None else f'{result.peak:.2f} GiB'}"
            f"  {'' if errors is None else f'relative L1 {errors[0]:.4f}'}"
            f"{' of exact attention to the same tiles' if bench.skip and provider == OURS else ''}",
            flush=True,
        )
        if result.slow > len(result.times) // 2:
            print(f"{case.name:32} {provider:18} no rows: the host was slow in {result.slow} timings", flush=True)
        elif csv is not None:
            save(csv, bench, provider, result, ratio, errors)
    return failures


def save(csv: Path, bench: Bench, provider: str, result: Measured, ratio, errors) -> None:
    sizes = bench.case.attention()
    shared = {
        "suite": "end_to_end", "case": bench.case.name, "provider": provider,
        "recipe": bench.full_recipe if provider == OURS else "", "batch": sizes["batch"], "heads": sizes["heads"],
        "kv_heads": sizes["kv_heads"], "seq_q": sizes["seq_q"], "seq_k": sizes["seq_kv"],
        "head_dim": sizes["head_dim"], "causal": sizes["causal"],
        "includes_quantization": provider in (OURS, *RIVALS) or bound(provider) is not None,
        "rel_l2_error": "" if errors is None else f"{errors[1]:.5f}",
    }  # fmt: skip
    times = torch.tensor(result.times, dtype=torch.float64)
    p20, median, p80 = (f"{x:.3f}" for x in times.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)))
    append_row(
        csv, **shared, metric="time", unit="ms", median=median, p20=p20, p80=p80,
        ratio_vs_cudnn="" if ratio is None else f"{ratio:.3f}",
    )  # fmt: skip
    if result.peak is not None:
        append_row(csv, **shared, metric="peak_memory", unit="GiB", median=f"{result.peak:.3f}")
    if provider == OURS or provider in bench.rivals:
        metric = "rel_l1_same_tiles" if bench.skip else "rel_l1"
        append_row(csv, **shared, metric=metric, unit="1", median=f"{errors[0]:.5f}")
    if provider == OURS:
        append_row(csv, **shared, metric="int8_calls", unit="1", median=bench.int8_calls)
        if bench.case.is_denoiser:  # of the layer with the largest share
            append_row(csv, **shared, metric="redone_share", unit="1", median=f"{bench.redone:.5f}")


@torch.no_grad()
def main(arguments=None) -> int:
    options = parse(__doc__, arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_end_to_end.py times models on a GPU: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    csv = None if options.no_save else options.csv or (None if options.tiny else RESULTS)
    if csv is not None:
        check_appendable(csv)
    rivals = dict.fromkeys(name for name in options.rival if name in RIVALS)
    rivals |= {rival.provider: rival for rival in imported(x for x in options.rival if x in ATTENTION_RIVALS)}
    failures, model, built = [], None, None
    for case in chosen_cases(options):
        if built != (type(case), case.config):
            model = None  # freed before the next one is made, as two do not fit
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            model, built = make_model(case, device, torch.bfloat16), (type(case), case.config)
        bench = Bench(
            case, model, device, torch.bfloat16, recipe=options.recipe, min_tokens=options.min_tokens,
            reps=options.reps or case.reps, called=options.called, linears=options.linears,
            min_features=options.min_features, fast=options.fast, skip=options.skip,
            compensates=options.compensate, rounds=options.rounds, together=options.together, rivals=rivals,
        )  # fmt: skip
        failures += run_case(bench, csv)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
