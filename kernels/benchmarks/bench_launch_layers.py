"""Time eager whole models with all layers of the launch path that save host time, and without each.

    python kernels/benchmarks/bench_launch_layers.py --out rows.csv         # about four minutes on an H200
    python kernels/benchmarks/bench_launch_layers.py --case llama8b_decode_b1_4k --out rows.csv
    python kernels/benchmarks/bench_launch_layers.py --tiny --device cpu --out rows.csv

Layers: `replay` (replay.py: a call equal to an earlier one runs its launches again) and `way_round` (calls that
avoid PyTorch's dispatcher). They are switched off in this process alone, by patches.

Variants take turns, in another order in each round. All must give the same bits: a variant that does not gets no row.
Decoding is single tokens on an INT8 cache of random keys with a sync after each, as in generate(); the cache is cut
back after each turn. Denoisers begin a new run in each turn, and are timed from their third step on. A turn's value is
its median token or step, since others may use the host. Models are those of model_cases.py, with true shapes and
random weights. SDXL's short calls run in INT8 too, since all its calls are short.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from bench_end_to_end import held_to
from model_cases import CASES as MODELS
from model_cases import LLAMA_8B, Llama, make_inputs, make_model

import sage_kernels
import sage_processors as sp
from sage_kernels import DEFAULT_RECIPE
from sage_kernels.ops import attention, decode, replay
from sage_kernels.results import append_row
from sage_processors.evaluation.language import cache_argument


ALL = frozenset(("replay", "way_round"))
VARIANTS = {"everything": frozenset()} | {f"without_{name}": frozenset((name,)) for name in sorted(ALL)}
VARIANTS["without_any"] = ALL
WARM_UP, TIMED = 2, 4  # steps of a denoiser in one turn
_PLAIN = object()

_library = torch.library.Library("sage_benchmarks_layers", "DEF")
_library.define(
    "decode(Tensor q, Tensor k_codes, Tensor k_scale, Tensor v_codes, Tensor v_scale, Tensor? k_mean, "
    "Tensor? lengths, Tensor? sinks, bool ring, bool causal, int? window, float softcap, float? scale, "
    "Tensor? k_balance) -> Tensor"
)
_library.define(
    "append(Tensor k, Tensor v, Tensor? k_mean, Tensor(a!) k_codes, Tensor(b!) k_scale, Tensor(c!) v_codes, "
    "Tensor(d!) v_scale, int position, bool ring, Tensor? k_balance) -> ()"
)


def _decode(q, k_codes, k_scale, v_codes, v_scale, k_mean, lengths, sinks, ring, causal, window, softcap, scale,
            k_balance):  # fmt: skip
    return sage_kernels.sage_decode_attention(
        q, k_codes, k_scale, v_codes, v_scale, k_mean, lengths=lengths, ring=ring, causal=causal, window=window,
        softcap=softcap, sinks=sinks, scale=scale, k_balance=k_balance,
    )  # fmt: skip


def _append(*tensors_position_ring):
    *tensors, position, ring, k_balance = tensors_position_ring
    sage_kernels.append_kv(*tensors, position=position, ring=ring, k_balance=k_balance)


for _device in ("CPU", "CUDA"):
    _library.impl("decode", _decode, _device)
    _library.impl("append", _append, _device)


def dispatched_decode(q, k_codes, k_scale, v_codes, v_scale, k_mean=None, *, lengths, ring, attn_mask, causal, window,
                      softcap, sinks, scale, k_balance=None):  # fmt: skip
    """Call sage_decode_attention through the dispatcher, with replay behind it."""
    if attn_mask is not None:
        raise ValueError(f"attn_mask: got {type(attn_mask).__name__}, expected None in this benchmark")
    return torch.ops.sage_benchmarks_layers.decode(
        q, k_codes, k_scale, v_codes, v_scale, k_mean, lengths, sinks, ring, bool(causal), window, softcap, scale,
        k_balance,
    )  # fmt: skip


def dispatched_append(*tensors, position, ring=False, k_balance=None):
    """Call append_kv through the dispatcher, with replay behind it."""
    torch.ops.sage_benchmarks_layers.append(*tensors, position, ring, k_balance)


def replaced(original, stand_in) -> list:
    """Return patches of an op in all modules of sage_processors that imported it by name."""
    return [
        mock.patch.object(module, name, stand_in)
        for module in [x for key, x in list(sys.modules.items()) if key.startswith("sage_processors")]
        for name in [name for name, value in list(vars(module).items()) if value is original]
    ]


def plain_without_replay(q, *tensors) -> tuple:
    """Replace decode's look-ups: calls still avoid the dispatcher, but none is replayed."""
    plain = replay.is_plain_call(q, *(x for x in tensors if isinstance(x, torch.Tensor)))
    return (_PLAIN, None, None, None) if plain else decode._NOT_REPLAYED


def _patches(off: frozenset) -> list:
    change, patches = mock.patch.object, []
    if "replay" in off:
        patches.append(change(attention, "_try_replay", lambda *_, **__: (None, None)))
        patches.append(change(decode, "remember", lambda key, call, given, numbers=None: call()))
        anew = (lambda *_: decode._NOT_REPLAYED) if "way_round" in off else None
        attend = anew or (lambda q, cache, lengths, sinks, options: plain_without_replay(q, *cache, lengths, sinks))
        append = anew or (lambda tensors, position, ring: plain_without_replay(*tensors))
        patches += [change(decode, "_replay_attend", attend), change(decode, "_replay_append", append)]
    if "way_round" in off:
        patches.append(change(attention, "is_plain_call", lambda *_: False))
        if "replay" not in off:
            # the op's implementation looks calls up; sage_attention before it does not
            inner = attention._try_replay

            def behind_the_op(*arguments, dispatched=False):
                return inner(*arguments, dispatched=True) if dispatched else (None, None)

            patches.append(change(attention, "_try_replay", behind_the_op))
            patches += replaced(sage_kernels.sage_decode_attention, dispatched_decode)
            patches += replaced(sage_kernels.append_kv, dispatched_append)
    return patches


class Variant:
    """A set of layers that are off, with its own record of earlier calls."""

    def __init__(self, name: str, off: frozenset):
        self.name, self.off = name, off
        self.replays, self.values = {}, []

    @contextmanager
    def on(self):
        with ExitStack() as stack:
            patches = [mock.patch.object(replay, "replays", self.replays)]
            for patch in patches + _patches(self.off):
                stack.enter_context(patch)
            yield

    def steps(self) -> list:
        return [step for replay in self.replays.values() for step in replay.launches]

    def describe(self) -> str:
        return f"{len(self.replays)} calls known, {len(self.steps())} launches"

    def check(self) -> None:
        """Raise RuntimeError unless exactly the layers that are on were used. For a GPU only."""
        if bool(self.steps()) == ("replay" in self.off):
            raise RuntimeError(f"{self.name}: got {self.describe()}, expected the layers off: {sorted(self.off)}")


class Turn(NamedTuple):
    """One turn: the measured value, and the output, which must be the same bits for all variants."""

    value: float
    output: torch.Tensor


class DecodeCase(NamedTuple):
    name: str
    batch: int
    context: int
    tokens: int = 24
    metric, unit = "tokens_per_second", "1/s"

    def model_case(self, tiny: bool):
        case = Llama("llama8b_decode", LLAMA_8B, {"tokens": 512})
        return case.tiny() if tiny else case

    def small(self):
        return self._replace(name=f"{self.name}/tiny", context=24 + self.context // 2**12, tokens=3)

    def shape(self, case) -> dict:
        sizes = case.attention()
        return sizes | {"batch": self.batch, "seq_q": 1, "seq_kv": self.context}

    @contextmanager
    def running(self, model, case, device):
        """A function that makes a turn."""
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        config = model.config
        model.set_attn_implementation("sage_int8")
        cache = sp.Int8KVCache(config)
        generator = torch.Generator(device).manual_seed(2)

        def random(*shape):
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        shape = (self.batch, config.num_key_value_heads, self.context, config.head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(random(*shape), random(*shape), layer)
        ids = (random(self.batch, self.tokens).float().abs() * 1e4).long() % config.vocab_size
        before = sp.attention_report(model).calls
        given = {"use_cache": True} | cache_argument(model.forward, cache)

        def turn() -> Turn:
            outputs, times = [], []
            wait()
            for i in range(self.tokens):
                start = time.perf_counter()
                outputs.append(model(input_ids=ids[:, i : i + 1], **given, logits_to_keep=1).logits)
                wait()
                times.append(time.perf_counter() - start)
            for layer in cache.layers:
                layer.crop(-self.tokens)
            return Turn(self.batch / statistics.median(times), torch.cat(outputs, 1))

        yield turn
        calls = sp.attention_report(model).calls - before
        print(f"{self.name}: {calls} INT8 calls, cache of {cache.nbytes() / 2**30:.2f} GiB", flush=True)
        if not calls:
            raise RuntimeError(f"{self.name}: got no INT8 call, expected all of them")


class DenoiserCase(NamedTuple):
    name: str
    model: str
    min_tokens: int | None = None
    metric, unit = "time", "ms"

    def model_case(self, tiny: bool):
        case = MODELS[self.model]
        return case.tiny() if tiny else case

    def small(self):
        return self._replace(name=f"{self.name}/tiny")

    def shape(self, case) -> dict:
        return case.attention()

    @contextmanager
    def running(self, model, case, device):
        """A function that makes a turn."""
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        inputs = [make_inputs(case, step, device, torch.bfloat16) for step in range(WARM_UP + TIMED)]
        config = sp.SageAttnProcessor(scaling="timestep", min_tokens=self.min_tokens)
        with sp.apply(model, config) as handle, held_to("torch_sdpa_cudnn", device):

            def turn() -> Turn:
                handle.reset()
                times = []
                for given in inputs:
                    wait()
                    start = time.perf_counter()
                    output = model(**given, return_dict=True)[0]
                    wait()
                    times.append((time.perf_counter() - start) * 1e3)
                return Turn(statistics.median(times[WARM_UP:]), output)

            yield turn
            report = handle.report()
            print(f"{self.name}: {report.calls} INT8 calls, exact {dict(report.fallbacks)} in a turn", flush=True)
            if not report.calls:
                raise RuntimeError(f"{self.name}: got no INT8 call, expected some")


BENCHED = {
    case.name: case
    for case in (
        DecodeCase("llama8b_decode_b1_4k", 1, 4096),
        DecodeCase("llama8b_decode_b8_4k", 8, 4096),
        DecodeCase("llama8b_decode_b1_32k", 1, 32768),
        DecodeCase("llama8b_decode_b8_32k", 8, 32768),
        DenoiserCase("flux_1024", "flux_1024"),
        DenoiserCase("sdxl_1024/min_tokens0", "sdxl_1024", min_tokens=0),
    )
}


def take_turns(turn: Callable[[], Turn], rounds: int, device, names=VARIANTS) -> tuple[list[Variant], list[str]]:
    """Run the turns. Returns the variants with their values, and the failures in words."""
    variants = [Variant(name, VARIANTS[name]) for name in names]
    wanted, different = None, set()
    for number in range(-1, rounds):  # the first one warms up
        first = max(number, 0) % len(variants)
        for variant in variants[first:] + variants[:first]:
            gc.collect()
            with variant.on():
                value, output = turn()
            if wanted is None:
                wanted = output.clone()
            if not torch.equal(output, wanted):
                different.add(variant.name)
            if number >= 0:
                variant.values.append(value)
    failures = [f"{name}: got other bits than the first turn had" for name in sorted(different)]
    for variant in variants:
        print(f"    {variant.name:18} {variant.describe()}", flush=True)
        try:
            if device.type == "cuda":
                variant.check()
        except RuntimeError as error:
            failures.append(str(error))
    if not wanted.isfinite().all():
        failures = [f"{variant.name}: got an output that is not finite" for variant in variants]
    return variants, failures


def run_case(benched, model, case, device, rounds: int, out: Path | None, names=VARIANTS) -> list[str]:
    """Measure all variants of one case and append their rows. Returns the failures."""
    begin = time.perf_counter()
    with benched.running(model, case, device) as turn:
        variants, failures = take_turns(turn, rounds, device, names)
    failed = {failure.partition(":")[0] for failure in failures}
    for variant in variants:
        quantiles = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        p20, median, p80 = torch.tensor(variant.values, dtype=torch.float64).quantile(quantiles).tolist()
        # slowdown without the layer, from pairs of the same round
        slower = statistics.median(
            (b / a if benched.unit == "1/s" else a / b)
            for a, b in zip(variant.values, variants[0].values, strict=True)
        )
        print(
            f"{benched.name:24} {variant.name:18} {median:10.3f} {benched.unit:4} ({p20:.3f} to {p80:.3f})  "
            f"slower by {100 * (slower - 1):+.2f} %{'  FAILED' if variant.name in failed else ''}",
            flush=True,
        )
        if out is not None and variant.name not in failed:
            sizes = benched.shape(case)
            append_row(
                out, suite="end_to_end", case=f"{benched.name}/{variant.name}", provider="sage_kernels",
                recipe=DEFAULT_RECIPE, batch=sizes["batch"], heads=sizes["heads"], kv_heads=sizes["kv_heads"],
                seq_q=sizes["seq_q"], seq_k=sizes["seq_kv"], head_dim=sizes["head_dim"], causal=sizes["causal"],
                includes_quantization=True, metric=benched.metric, unit=benched.unit, median=f"{median:.3f}",
                p20=f"{p20:.3f}", p80=f"{p80:.3f}",
            )  # fmt: skip
    print(f"{benched.name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return [f"{benched.name} {failure}" for failure in failures]


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=sorted(BENCHED), help="may be repeated; all by default")
    parser.add_argument(
        "--variant", action="append", choices=list(VARIANTS)[1:], help="beside all layers; all by default"
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns of each variant, after one that warms up")
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same classes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="CSV file that rows are appended to; printed only by default")
    return parser.parse_args(arguments)


@torch.no_grad()
def main(arguments=None) -> int:
    options = parse(arguments)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("bench_launch_layers.py times models on a GPU: no CUDA GPU was found here.", file=sys.stderr)
        return 2
    failures, model, built = [], None, None
    for name in options.case or BENCHED:
        benched = BENCHED[name]
        if isinstance(benched, DenoiserCase) and importlib.util.find_spec("diffusers") is None:
            failures.append(f"{name}: left out, diffusers is not installed")
            continue
        case = benched.model_case(options.tiny)
        benched = benched.small() if options.tiny else benched
        if built != (type(case), case.config):
            model = None  # freed before the next one is made, as two do not fit
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            model, built = make_model(case, device, torch.bfloat16), (type(case), case.config)
        names = ["everything", *options.variant] if options.variant else VARIANTS
        failures += run_case(benched, model, case, device, options.rounds, options.out, names)
    for failure in failures:
        print(f"FAILED {failure}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
