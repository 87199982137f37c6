"""Time the prefill of a long prompt with stock and with INT8 attention, and print the sizes of the KV caches.

python examples/long_prefill.py --min-tokens 2        # the embedded model: on a GPU 512 tokens would run in 16 bit
python examples/long_prefill.py --model meta-llama/Llama-3.1-8B --tokens 32768
python examples/long_prefill.py --model folder/with/config.json --random --tokens 131072
"""

import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import sage_processors as sp
from sage_processors.cli.arguments import OneLineParser, at_least
from sage_processors.evaluation import language


@torch.no_grad()
def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("--model", default="tiny_lm", help="name on the Hub, folder, or embedded: tiny_lm")
    parser.add_argument("--random", action="store_true", help="take the config only: true shapes, random weights")
    parser.add_argument("--tokens", type=at_least(1), default=512)
    parser.add_argument(
        "--min-tokens", type=at_least(0), help="shorter prompts run exact attention; measured by default"
    )
    args = parser.parse_args()

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    with parser.loading(args.model):
        if args.random:
            with torch.device(device):
                config = AutoConfig.from_pretrained(language.locate(args.model))
                model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        else:
            model, _ = language.load(args.model, device=device, dtype=dtype)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, args.tokens), device=device)
    sp.register_transformers("sage_long_prefill", min_tokens=args.min_tokens)
    for name, make_cache in (("sdpa", DynamicCache), ("sage_long_prefill", sp.Int8KVCache)):
        model.set_attn_implementation(name)
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(4):  # the first is not counted
            cache = make_cache(config=model.config)
            given, start = language.cache_argument(model.forward, cache), time.perf_counter()
            logits = model(ids, **given, use_cache=True, logits_to_keep=1).logits
            logits.sum().item()  # waits for the GPU
            seconds.append(time.perf_counter() - start)
        held, bf16 = (language.kv_bytes_per_token(cache, as_if) for as_if in (None, torch.bfloat16))
        peak = f", peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if ids.is_cuda else ""
        print(f"{name}, {args.tokens} tokens: {statistics.median(seconds[1:]) * 1e3:.1f} ms{peak}; "
              f"KV cache {held} bytes a token, {held / bf16:.3f} of bf16")  # fmt: skip
    sp.attention_report(model).print()


if __name__ == "__main__":
    main()
