"""Time model.generate of a language model, token by token, ours beside transformers' own caches.

    python kernels/benchmarks/bench_generate.py --context 4096 --batch 1
    python kernels/benchmarks/bench_generate.py --tiny --device cpu --no-save

Random weights of Llama 3.1 8B's shape. Every call has a new cache, as users have. A streamer notes when each token
arrives on the host; the first tokens, in which graphs are captured and code is compiled, don't count. Rows of suite
generate, case llama8b_b{batch}_{context}, or llama8b_l{layers}_b… with --layers, metric time in ms a token,
ratio_vs_cudnn against the fastest stock of the run; `first_call` is the time of a provider's first call in s, with all
compiling and capturing; `peak_memory` that of its last call in GiB. "small" and "small_int8_head" drop 16-bit weights,
the second those of lm_head too. torchao's INT8 and FP8 weights run as torchao advises: in stock's static cache,
compiled.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
from bench import RESULTS

import sage_processors as sp
from sage_kernels.results import append_row, check_appendable


FULL = 32  # layers of Llama 3.1 8B
SETTLED = 8  # tokens of a call before those that count
# Those from "small" on change a model for good and get one of their own
OURS = {
    "fast": lambda: sp.SageAttnProcessor("fast"),
    "attention_and_cache": lambda: sp.SageAttnProcessor(graphs="auto"),
    "small": lambda: sp.SageAttnProcessor("small"),
    "small_int8_head": lambda: sp.SageAttnProcessor("small", layers={"lm_head": {"linears": "int8"}}),
}
TORCHAO = {"torchao_int8_weights": "Int8WeightOnlyConfig", "torchao_fp8_weights": "Float8WeightOnlyConfig"}
PROVIDERS = ("stock_dynamic", "stock_static_compiled", *OURS, *TORCHAO)
USUAL = PROVIDERS[:4]


class Clock:
    """A streamer that notes the arrival of each token. Attributes: times: in s."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def make_model(tiny: bool, device: torch.device, dtype: torch.dtype, layers: int = FULL) -> Any:
    """Return a model of Llama 3.1 8B's shape with random weights, with this many layers, or a tiny one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers)
    shape |= dict(num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131_072)
    if tiny:
        shape |= dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
        shape |= dict(num_attention_heads=4, num_key_value_heads=2)
    config = LlamaConfig(**shape, rope_theta=500_000.0, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def generated(model: Any, ids: torch.Tensor, new: int, **options: Any) -> tuple[torch.Tensor, list[float], float]:
    """Return the tokens, ms between tokens from the settled ones on, and the whole time in s."""
    gc.collect()
    if ids.is_cuda:
        torch.cuda.synchronize()
    clock, start = Clock(), time.perf_counter()
    # a streamer takes one sequence; with more, its clock is called by hand
    given = {"streamer": clock} if ids.shape[0] == 1 else {"stopping_criteria": [_Ticking(clock)]}
    out = model.generate(ids, max_new_tokens=new, do_sample=False, **given, **options)
    if ids.is_cuda:
        torch.cuda.synchronize()
    whole = time.perf_counter() - start
    times = clock.times[1:] if ids.shape[0] == 1 else clock.times
    gaps = [1e3 * (b - a) for a, b in zip(times, times[1:], strict=False)]
    return out, gaps[SETTLED:], whole


class _Ticking:
    """A stopping criterion that never stops and notes the time of each step."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        self.clock.put(None)
        return done


def run(provider: str, model: Any, ids: torch.Tensor, new: int) -> dict[str, Any]:
    """Run one provider. Returns its first call in s, quantiles of ms a token and GiB of its last call, its tokens."""
    handle, options = None, {}
    if provider in OURS:
        handle = sp.apply(model, OURS[provider]())
    elif provider != "stock_dynamic":
        options = {"cache_implementation": "static"}
    if provider in TORCHAO:
        import torchao.quantization as ao

        ao.quantize_(model, getattr(ao, TORCHAO[provider])())
    try:
        _, _, first = generated(model, ids, new, **options)
        calls = 1 if provider == "stock_dynamic" else 2
        for _ in range(calls):
            if ids.is_cuda:
                torch.cuda.reset_peak_memory_stats(ids.device)
            out, gaps, _ = generated(model, ids, new, **options)
        peak = torch.cuda.max_memory_allocated(ids.device) / 2**30 if ids.is_cuda else None
        if handle is not None:
            print(*handle.report().notes, sep="\n", flush=True)
    finally:
        if handle is not None and provider in USUAL:
            handle.remove()
    p20, median, p80 = (statistics.quantiles(gaps, n=10)[i] for i in (1, 4, 7))
    return {"first": first, "times": (p20, median, p80), "tokens": out[:, ids.shape[1] :], "peak": peak}


def save_rows(
    options: Any, case: tuple[str, int], shape: Any, provider: str, found: dict[str, Any], stock: float | None
) -> None:
    """Append the rows of one provider.

    Args: case: its name, and tokens of the prompt. shape: config of the model. stock: ms a token of the run's fastest.
    """
    name, context = case
    preset = f"preset_{provider}" if provider in ("fast", "small") else provider
    shared = {
        "suite": "generate", "case": name, "provider": "sage_kernels" if provider in OURS else provider,
        "recipe": preset if provider in OURS else "", "batch": options.batch, "heads": shape.num_attention_heads,
        "kv_heads": shape.num_key_value_heads, "seq_q": 1, "seq_k": context,
        "head_dim": shape.head_dim, "causal": True,
    }  # fmt: skip
    p20, median, p80 = (f"{value:.4f}" for value in found["times"])
    ratio = {} if stock is None else {"ratio_vs_cudnn": f"{stock / found['times'][1]:.3f}"}
    append_row(options.csv, **shared, **ratio, metric="time", unit="ms", median=median, p20=p20, p80=p80)
    append_row(options.csv, **shared, metric="first_call", unit="s", median=f"{found['first']:.2f}")
    if found["peak"] is not None:
        append_row(options.csv, **shared, metric="peak_memory", unit="GiB", median=f"{found['peak']:.3f}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="*", default=[4096], help="tokens of the prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new", type=int, default=32, help="new tokens")
    parser.add_argument("--layers", type=int, default=FULL, help="of the model; torchao compiles fewer in less time")
    parser.add_argument("--providers", nargs="*", choices=PROVIDERS, default=list(USUAL))
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--csv", default=RESULTS)
    options = parser.parse_args(arguments)
    save = not options.no_save
    if save:
        check_appendable(options.csv)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make_model(options.tiny, device, dtype, options.layers)
    shape, failed = model.config, 0
    for context in options.context:
        ids = torch.randint(3, shape.vocab_size, (options.batch, context), device=device)
        size = "llama8b" if options.layers == FULL else f"llama8b_l{options.layers}"
        name, found = f"{size}_b{options.batch}_{context}{'/tiny' * options.tiny}", {}
        unsaved, order = [], sorted(options.providers, key=PROVIDERS.index)  # stock first: ratios are to its fastest
        for provider in order:
            try:
                if model is None or provider not in USUAL:
                    model = None
                    gc.collect()
                    model = make_model(options.tiny, device, dtype, options.layers)
                found[provider] = run(provider, model, ids, options.new)
                model = model if provider in USUAL else None
            except Exception as error:  # the others go on
                failed += provider in OURS
                print(f"{name:28} {provider:24} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            first, (_, median, _), peak = (found[provider][key] for key in ("first", "times", "peak"))
            print(
                f"{name:28} {provider:24} {median:8.3f} ms a token, first call {first:6.2f} s, {peak} GiB", flush=True
            )
            torch.cuda.empty_cache() if device.type == "cuda" else None
            stock = [x["times"][1] for key, x in found.items() if key.startswith("stock")]
            unsaved.append(provider)
            if save and (not provider.startswith("stock") or provider == order[-1]):  # all of stock ran
                while unsaved:
                    save_rows(
                        options, (name, context), shape, unsaved[0], found[unsaved.pop(0)], min(stock, default=None)
                    )
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
