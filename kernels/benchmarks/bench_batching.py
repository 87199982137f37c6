"""Time continuous batching (model.generate_batch) of a language model, ours beside transformers' own.

    python kernels/benchmarks/bench_batching.py --layers 32
    python kernels/benchmarks/bench_batching.py --tiny --device cpu --no-save

64 prompts of 100 to 4,000 random tokens, Llama 3.1 8B's shape with random weights. A server is started for each
provider, and serves twice, with other prompts each time; the second time counts, from the first prompt handed in to
the last token. Stock runs transformers' paged cache with SDPA, and with PyTorch's flash attention for packed
sequences, from CUDA graphs. Rows of suite generate, case batching_llama8b_l{layers}_{prompts}x{longest}:
tokens_per_second of new tokens, ratio_vs_cudnn against the fastest stock of the run, and kv_bytes of one cache.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from bench import RESULTS
from bench_generate import make_model

import sage_processors as sp
from sage_kernels.results import append_row, check_appendable


PROVIDERS = ("stock_sdpa", "stock_torch_flash", "attention_and_cache", "fast")
PAGE = 256


def torch_flash(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, cache: Any = None, **step: Any
) -> Any:
    """Run PyTorch's flash attention on transformers' own paged cache, as an attention implementation of a server."""
    if cache is not None:  # before transformers 5.24, which updates it in the model's layer
        wanted = "kwargs" in type(cache).update.__annotations__
        places = {"kwargs": step} if wanted else {name: step[name] for name in ("read_index", "write_index")}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **places)
    k, v = (x[0].transpose(0, 1) if x.dim() == 4 else x for x in (key, value))
    ends, longest = step["cu_seq_lens_k"], step.get("max_seqlen_k", step.get("max_length_k"))
    if isinstance(ends, dict):
        ends, longest = ends["full_attention"], longest["full_attention"]
    out = torch.ops.aten._flash_attention_forward(
        query[0].transpose(0, 1).contiguous(), k.contiguous(), v.contiguous(), step["cu_seq_lens_q"].int(), ends.int(),
        step.get("max_seqlen_q", step.get("max_length_q")), longest, 0.0, True, False, scale=module.scaling,
    )  # fmt: skip
    return out[0][None], None


def prompts(number: int, longest: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return prompts of evenly spread lengths from 100 to `longest` tokens, in a random order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(min(100, longest), longest, number).int()[torch.randperm(number, generator=generator)]
    return [torch.randint(3, vocabulary, (int(n),), generator=generator).tolist() for n in lengths]


def kv_bytes(cache: Any) -> int:
    """Return the bytes of a server's keys and values."""
    if hasattr(cache, "cache_tensor"):
        return int(cache.cache_tensor.nbytes)
    return sum(x.nbytes for x in (*cache.key_cache, *cache.value_cache))


def run(provider: str, model: Any, options: argparse.Namespace) -> tuple[float, float, int, list[list[int]]]:
    """Run one provider. Returns seconds of its first and second service, bytes of its cache, and texts."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.modeling_utils import AttentionInterface

    size = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    page = 16 if options.tiny else PAGE
    pages = options.prompts * (-(-(options.longest + options.new) // page) + 1)
    settings = ContinuousBatchingConfig(
        **{"num_blocks": pages, "max_batch_tokens": options.step, size: page},
        **({"auto_switch_to_flash": False} if hasattr(ContinuousBatchingConfig(), "auto_switch_to_flash") else {}),
    )
    generation = GenerationConfig(max_new_tokens=options.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    handle = None
    if provider == "stock_sdpa":
        model.config._attn_implementation = "paged|sdpa" if size == "block_size" else "sdpa"
    elif provider == "stock_torch_flash":
        for name in ("torch_flash", "paged|torch_flash"):
            AttentionInterface.register(name, torch_flash)
        model.config._attn_implementation = "paged|torch_flash" if size == "block_size" else "torch_flash"
    else:
        model.config._attn_implementation = "sdpa"
        handle = sp.apply(model, sp.SageAttnProcessor("fast") if provider == "fast" else sp.SageAttnProcessor())
    times = []
    try:
        for seed in range(2):
            given = prompts(options.prompts, options.longest, model.config.vocab_size, seed)
            start = time.perf_counter()
            found = list(model.generate_batch(given, generation, settings, persistent_manager=True).values())
            times.append(time.perf_counter() - start)
            failed = [x.error for x in found if x.error is not None]
            if failed or len(found) != len(given):
                raise RuntimeError(f"{len(found)} of {len(given)} prompts came back, with errors {failed[:1]}")
        held = kv_bytes(model._cached_continuous_batching_manager.batch_processor.cache)
        if handle is not None:
            print(handle.report().verdict, flush=True)
    finally:
        model.destroy_cached_continuous_batching_manager()
        if handle is not None:
            handle.remove()
    return times[0], times[1], held, [x.generated_tokens for x in found]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=4000, help="tokens of the longest prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each")
    parser.add_argument("--layers", type=int, default=32, help="of the model; fewer take less time")
    parser.add_argument("--step", type=int, default=8192, help="most tokens of a step")
    parser.add_argument("--providers", nargs="*", choices=PROVIDERS, default=list(PROVIDERS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--csv", default=RESULTS)
    options = parser.parse_args(arguments)
    if not options.no_save:
        check_appendable(options.csv)
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make_model(options.tiny, device, dtype, layers=2 if options.tiny else options.layers)
    name = f"batching_llama8b_l{model.config.num_hidden_layers}_{options.prompts}x{options.longest}"
    name += "/tiny" * options.tiny
    rates, texts, failed = {}, {}, 0
    for provider in options.providers:
        try:
            first, second, held, texts[provider] = run(provider, model, options)
        except Exception as error:  # the others go on
            failed += not provider.startswith("stock")
            print(f"{name:36} {provider:20} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache() if device.type == "cuda" else None
        rates[provider] = options.prompts * options.new / second, held
        stock = [rate for who, (rate, _) in rates.items() if who.startswith("stock")]
        ratio = rates[provider][0] / max(stock) if stock else float("nan")
        print(
            f"{name:36} {provider:20} {rates[provider][0]:9.1f} tokens/s ({ratio:.2f} of stock), first {first:.2f} s, "
            f"second {second:.2f} s, KV {held / 2**30:.3f} GiB", flush=True,
        )  # fmt: skip
    base = texts.get("stock_torch_flash", texts.get("stock_sdpa", []))
    for provider, own in texts.items():
        same = [a == b for x, y in zip(base, own, strict=False) for a, b in zip(x[:1], y[:1], strict=False)]
        print(f"{provider:20} first tokens as stock: {sum(same)} of {len(same)}", flush=True)
    for provider, (rate, held) in rates.items() if not options.no_save else ():
        ours = not provider.startswith("stock")
        shared = {"suite": "generate", "case": name, "provider": "sage_kernels" if ours else provider,
                  "recipe": f"preset_{provider}" if provider == "fast" else provider if ours else "",
                  "batch": options.prompts, "heads": model.config.num_attention_heads,
                  "kv_heads": model.config.num_key_value_heads, "seq_q": options.new, "seq_k": options.longest,
                  "head_dim": model.config.head_dim, "causal": True}  # fmt: skip
        ratio = {"ratio_vs_cudnn": f"{rate / max(stock):.3f}"} if stock else {}
        append_row(options.csv, **shared, **ratio, metric="tokens_per_second", unit="1", median=f"{rate:.1f}")
        append_row(options.csv, **shared, metric="kv_bytes", unit="B", median=held)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
