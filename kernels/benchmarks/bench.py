"""Time our attention against PyTorch's on this GPU: check, time, append rows to results.csv.

    make bench
    make bench ARGS="--set all --no-save"
    make bench ARGS="--set rivals --drift --with sageattention_2 --with flash_attn_3"

Every time includes smoothing and quantisation. A provider with too large an error gets no time and no row. All
providers of a case run in turns in one process, and ratios are those of their medians: absolute times drift from run
to run, and a GPU that has been busy for seconds is slower.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import triton
from cases import SETS
from rival_attention import ATTENTION_RIVALS, bound, imported, of_case
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sage_kernels import DEFAULT_RECIPE, RECIPES, sage_attention
from sage_kernels.facts.recipe import FP8_RECIPE
from sage_kernels.planning import state as planning
from sage_kernels.results import DRIFT, append_row
from sage_kernels.testing import relative_l2


RESULTS = Path(__file__).resolve().parent / "results.csv"
# Relative L2 on N(0, 1), by the format of P and V: above the recipes' own 0.01 to 0.015 and 0.037 to 0.042, far below
# that of any bug
MAX_ERROR = {"16bit": 0.03, "fp8_e4m3": 0.05, "int8": 0.03}
STUDY_ERROR = 0.1  # of recipes for comparison only, whose error is the subject
SDPA = ("torch_sdpa_cudnn", "torch_sdpa_flash")
# FlexAttention takes half a minute to compile for a shape
FLEX_CASES = [f"D{d}_N{n}_{kind}" for d in (64, 128) for n in (8192, 16384) for kind in ("full", "causal")]
ROUNDS = 3  # turns of every provider
HOST_CALLS = 50
GATE_ROWS = 512  # query rows that are compared with fp64; rows are independent of each other


def options_of(case):
    """Return the keyword arguments of `sage_attention` for the case's mask."""
    if case.hidden_keys:
        mask = torch.ones(case.batch, 1, 1, case.seq_kv, dtype=torch.bool, device="cuda")
        mask[..., case.seq_kv - case.hidden_keys :] = False
        return {"attn_mask": mask}
    return {"causal": "bottom_right"} if case.causal else {}


def exact_rows(case, q, k, v):
    """Return attention of the last GATE_ROWS query rows in fp64, head by head to save memory."""
    q = q[:, -GATE_ROWS:]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    visible[:, k.shape[1] - case.hidden_keys :] = False
    if case.causal:
        visible = visible.tril(k.shape[1] - q.shape[1])
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            scores = q[b, :, h].double() @ k[b, :, h * case.kv_heads // case.heads].double().T * q.shape[3] ** -0.5
            p = scores.masked_fill(~visible, -math.inf).softmax(-1)
            out[b, :, h] = p @ v[b, :, h * case.kv_heads // case.heads].double()
    return out


def torch_sdpa(case, backend, attn_mask=None, causal=""):
    if causal and case.seq_q != case.seq_kv:
        raise ValueError("causal: got different lengths, expected equal ones (torch aligns them top left)")

    def run(q, k, v):
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(
                q, k, v, attn_mask, is_causal=bool(causal), enable_gqa=case.heads != case.kv_heads
            ).transpose(1, 2)

    return run


def planned_attention(
    case, q, k, v, lagged=False, rotation="none", attention=sage_attention, planning=planning, drift=False, **options
):
    """Return attention with timestep scaling and a plan, made from one call on these inputs.

    Args:
        lagged: keep the rows' maxima as the softmax reference of the next call (FP8). Each set of inputs has its own
            maxima, since a denoising step sees nearly the rows of the step before, but another random draw does not.
            Query tiles whose reference does not fit are computed again; that is counted and timed. "/running_max" is
            the same without such a reference.
        attention, planning: `sage_attention` and the module of ScaleState and Site, possibly of another version.
        drift: all sets of inputs are of one layer (`drifting_sets`) and share the maxima.
    """
    options |= {"rotation": rotation}
    scales = planning.ScaleState([planning.Site("bench", case.kv_heads, case.head_dim, rotation)], device=q.device)
    state = scales.head_state(0)
    kept = {}

    def run(q, k, v):
        mine = state
        if lagged:
            layer = 0 if drift else q.data_ptr()
            known = layer in kept
            if not known:
                kept[layer] = q.new_empty(case.batch, case.heads, case.seq_q, dtype=torch.float32)
            mine = state.keeping(kept[layer], known)
        return attention(q, k, v, state=mine, **options)

    run(q, k, v)
    scales.advance(1.0, 0.9)

    run.scales = scales
    return run


def providers(case, inputs, rivals=(), drift=False):
    """Yield (provider, suffix of the case's name, recipe, function) for everything that runs here.

    rivals: of other packages; with drift, ours runs as a denoising step does alone.
    """
    options = options_of(case)
    yield "torch_sdpa_cudnn", "", "", torch_sdpa(case, SDPBackend.CUDNN_ATTENTION, **options)
    if "attn_mask" not in options:  # flash supports no mask tensor
        yield "torch_sdpa_flash", "", "", torch_sdpa(case, SDPBackend.FLASH_ATTENTION, **options)
        for rival in rivals:
            if rival.attend is not None or case.name.partition("/")[0] in FLEX_CASES:
                yield rival.provider, "", "", of_case(rival, case)
    ours = partial(planned_attention, case, *inputs, drift=drift, **options)
    yield "sage_kernels", "", DEFAULT_RECIPE, ours()
    eight = torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)
    if eight:
        yield "sage_kernels", "", FP8_RECIPE, ours(recipe=FP8_RECIPE, lagged=True)
    if drift:
        return
    yield "sage_kernels", "/hadamard", DEFAULT_RECIPE, ours(rotation="hadamard")
    for scaling in ("per_block", "per_token"):
        yield "sage_kernels", f"/{scaling}", DEFAULT_RECIPE, partial(sage_attention, scaling=scaling, **options)
    if eight:
        yield "sage_kernels", "/running_max", FP8_RECIPE, ours(recipe=FP8_RECIPE)
        fp8 = options | {"recipe": FP8_RECIPE, "scaling": "per_block"}
        yield "sage_kernels", "/per_block", FP8_RECIPE, partial(sage_attention, **fp8)


def make_inputs(case, dtype):
    def normal(seq, heads):
        return torch.randn(case.batch, seq, heads, case.head_dim, device="cuda", dtype=dtype)

    return normal(case.seq_q, case.heads), normal(case.seq_kv, case.kv_heads), normal(case.seq_kv, case.kv_heads)


def host_microseconds(function, inputs) -> list[float]:
    """Return the time that each of HOST_CALLS calls takes to return, with an empty GPU queue before it."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function(*inputs)
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return times


def quintiles(values: list[float]) -> tuple[float, float, float]:
    """Return p20, median, p80."""
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return cuts[0], statistics.median(values), cuts[3]


@dataclass
class Entrant:
    """One provider that passed the correctness gate of a case.

    Attributes:
        suffix: of the case's name in its rows.
        error: relative L2 against fp64; None if it is not known.
        times: of its calls so far, in ms.
    """

    provider: str
    suffix: str
    recipe: str
    function: Callable
    error: float | None
    times: list[float] = field(default_factory=list)

    @property
    def is_ours(self) -> bool:
        return self.provider == "sage_kernels"

    @property
    def is_int8(self) -> bool:
        return self.is_ours or bound(self.provider) is not None


def gate(case, inputs, offered, exact=None) -> tuple[list[Entrant], list[str]]:
    """Check the error of each provider. Returns the entrants that passed, and the failures in words.

    offered: as from `providers`. exact: the last rows of the exact result, if that is not attention of `inputs`.
    """
    exact = exact_rows(case, *inputs) if exact is None else exact
    entrants, failures = [], []
    for provider, suffix, recipe, function in offered:
        try:
            error = float(relative_l2(function(*inputs)[:, -GATE_ROWS:], exact))
        except Exception as failure:
            # a peer that can't run may raise anything; PyTorch's back ends raise RuntimeError
            if provider == "sage_kernels" or (provider in SDPA and not isinstance(failure, RuntimeError)):
                raise
            print(f"{case.name:42} {provider:18} not here: {str(failure).splitlines()[0][:80]}", flush=True)
            continue
        if bound(provider) is not None:
            bar = bound(provider)
        elif recipe in RECIPES:
            bar = STUDY_ERROR if RECIPES[recipe].study else MAX_ERROR[RECIPES[recipe].pv]
        else:
            bar = MAX_ERROR["16bit"]  # mixed precision, which has P and V in 16 bit, and others' 16-bit attention
        if error <= bar:
            entrants.append(Entrant(provider, suffix, recipe, function, error))
        else:
            failures.append(f"{case.name}{suffix} {provider} {recipe}: relative L2 {error:.3g} > {bar}")
            print(f"FAILED {failures[-1]}", flush=True)
    return entrants, failures


def make_sets(case, dtype=torch.bfloat16) -> list:
    """Return sets of inputs, at least two and together too large for the 50 MB cache."""
    bytes_a_set = 2 * case.batch * case.head_dim * (case.seq_q * case.heads + 2 * case.seq_kv * case.kv_heads)
    return [make_inputs(case, dtype) for _ in range(max(2, math.ceil(200e6 / bytes_a_set)))]


def drifting_sets(case, dtype=torch.bfloat16, parts=0.2, grows=1.03) -> list:
    """Return inputs of one layer at one denoising step, and at several that may follow it.

    As in models, channels of K have means of their own. From the first set to each of the others, `parts` of q, k and
    v are drawn again (relative L2), all of them grow or shrink by up to `grows`, and the means move by 5 %.
    """
    first, means = make_inputs(case, dtype), 3 * torch.randn(1, 1, case.kv_heads, case.head_dim, device="cuda")
    sets = [(first[0], (first[1] + means).to(dtype), first[2])]
    for turn in range(len(make_sets(case, dtype))):
        scale = grows if turn % 2 else 1 / grows
        q, k, v = (
            scale * ((1 - parts**2) ** 0.5 * x + parts * new)
            for x, new in zip(first, make_inputs(case, dtype), strict=True)
        )
        sets.append((q.to(dtype), (k + means * (1 + 0.05 * torch.randn_like(means))).to(dtype), v.to(dtype)))
    return sets


def take_turns(case, entrants: list[Entrant], sets_of: Callable) -> None:
    """Time all entrants in turns, each call on the next set of inputs. sets_of(entrant): its sets."""
    for _ in range(ROUNDS):
        for entrant in entrants:
            function, sets, turn = entrant.function, sets_of(entrant), iter(range(1 << 60))
            entrant.times += triton.testing.do_bench(
                lambda f=function, s=sets, t=turn: f(*s[next(t) % len(s)]), warmup=25, rep=case.rep // ROUNDS,
                return_mode="all",
            )  # fmt: skip


def run_case(case, save: bool, rivals=(), drift=False) -> list[str]:
    """Gate and time every provider on `case`. Returns the failures.

    drift: a plan of one step serves the steps after it, whose inputs differ; the case's name says so.
    """
    planned, *timed = drifting_sets(case) if drift else make_sets(case)
    case = case._replace(name=f"{case.name}/{DRIFT}") if drift else case
    sets = timed if drift else [planned, *timed]
    entrants, failures = gate(case, sets[0], providers(case, planned, rivals, drift))
    race(case, entrants, sets, save)
    return failures


def race(case, entrants: list[Entrant], sets: list, save: bool, pacers: int = 0) -> None:
    """Time entrants in turns and report them, except the first `pacers`, which have rows already."""
    take_turns(case, entrants, lambda _: sets)
    cudnn = next((quintiles(e.times)[1] for e in entrants if e.provider == "torch_sdpa_cudnn"), None)
    best = min((quintiles(e.times)[1] for e in entrants if not e.is_int8), default=math.inf)
    for entrant in entrants[pacers:]:
        report(case, entrant, cudnn, best, sets[0], save)


def run_cases(description: str, cases: list, run_one: Callable, recipes: Sequence[str] = ()) -> int:
    """Run a benchmark as a command with the options --no-save and, if it has several `recipes`, --recipe.

    run_one: (case, save) or (case, save, chosen recipes) → the failures. Returns the exit status.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    if recipes:
        parser.add_argument("--recipe", action="append", choices=recipes, help="only this one; may be repeated")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name} times GPU kernels: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    chosen = [arguments.recipe or recipes] if recipes else []
    failures = [failure for case in cases for failure in run_one(case, not arguments.no_save, *chosen)]
    return 1 if failures else 0


def report(case, entrant: Entrant, cudnn_ms, best_ms, inputs, save: bool) -> None:
    """Print the measurements of one provider, and append its rows."""
    # operations that count as work: hidden padding does, the hidden half of a causal square does not
    flops = 4 * case.batch * case.heads * case.seq_q * case.seq_kv * case.head_dim / (2 if case.causal else 1)
    p20, median, p80 = quintiles(entrant.times)
    # the slow end of the times is the low end of the rates
    tflops = [flops / ms / 1e9 for ms in (median, p80, p20)]
    ratio = cudnn_ms / median if cudnn_ms else None
    line = f"{case.name + entrant.suffix:42} {entrant.provider:18}"
    error = "" if entrant.error is None else f"{entrant.error:.5f}"
    print(f"{line} {entrant.recipe:16} {tflops[0]:7.1f} TFLOPS  {ratio or math.nan:.3f}x  {error}", flush=True)
    shared = {
        "suite": "attention_fwd", "case": case.name + entrant.suffix, "provider": entrant.provider,
        "recipe": entrant.recipe, "batch": case.batch, "heads": case.heads, "kv_heads": case.kv_heads,
        "seq_q": case.seq_q, "seq_k": case.seq_kv, "head_dim": case.head_dim, "causal": case.causal,
        "includes_quantization": entrant.is_int8, "rel_l2_error": error,
    }  # fmt: skip
    if save:
        append_row(
            RESULTS, **shared, metric="throughput", unit="TFLOPS", median=f"{tflops[0]:.1f}", p20=f"{tflops[1]:.1f}",
            p80=f"{tflops[2]:.1f}", ratio_vs_cudnn="" if ratio is None else f"{ratio:.3f}",
        )  # fmt: skip
    site = entrant.function.scales.summary()[0] if hasattr(entrant.function, "scales") else {"lagged": 0}
    if site["lagged"]:  # tiles with an earlier call's reference, which might not have fitted
        print(f"{'':42} {site['redone']:.2%} of the tiles of query rows were done again", flush=True)
        if save:
            append_row(RESULTS, **shared, metric="redone_share", unit="1", median=f"{site['redone']:.5f}")
    if case.host_time and entrant.is_ours:
        low, host, high = quintiles(host_microseconds(entrant.function, inputs))
        print(
            f"{line} {best_ms / median:.3f} of the best 16-bit provider; the call returns after {host:.1f} us",
            flush=True,
        )
        if save:
            numbers = {"median": f"{host:.1f}", "p20": f"{low:.1f}", "p80": f"{high:.1f}"}
            append_row(RESULTS, **shared, metric="host_time", unit="us", **numbers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=sorted(SETS), default="headline")
    known = {case.name: case for cases in SETS.values() for case in cases}
    parser.add_argument("--case", action="append", choices=sorted(known), metavar="NAME", help="in place of a set")
    parser.add_argument(
        "--with", action="append", choices=ATTENTION_RIVALS, dest="rivals", help="of other packages; all by default"
    )
    parser.add_argument("--drift", action="store_true", help="inputs move as from one denoising step to the next")
    parser.add_argument("--no-save", action="store_true", help="print only, append nothing to results.csv")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.py times GPU kernels: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    cases = [known[name] for name in arguments.case] if arguments.case else SETS[arguments.set]
    rivals = list(imported(arguments.rivals or ATTENTION_RIVALS))
    failures = [x for case in cases for x in run_case(case, not arguments.no_save, rivals, arguments.drift)]
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
