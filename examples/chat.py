"""Talk to a causal language model that runs with INT8 attention and an INT8 KV cache.

python examples/chat.py                                   # the embedded model; an empty line ends the conversation
python examples/chat.py "What is 12 plus 7?" --stock
python examples/chat.py --model meta-llama/Llama-3.1-8B-Instruct --new-tokens 500
"""

import time

import torch
from transformers import DynamicCache, TextStreamer

import sage_processors as sp
from sage_kernels import RECIPES
from sage_processors.cli.arguments import OneLineParser, at_least
from sage_processors.evaluation import language


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("question", nargs="?", help="ask this and stop; without it, ask one after another")
    parser.add_argument("--model", default="tiny_lm", help="name on the Hub, folder, or embedded: tiny_lm")
    parser.add_argument("--recipe", choices=RECIPES, default="qk_int8_pv_bf16")
    parser.add_argument("--stock", action="store_true", help="with stock attention and a 16-bit cache")
    parser.add_argument("--new-tokens", type=at_least(1), default=200, help="of an answer, at most")
    args = parser.parse_args()

    with parser.loading(args.model):
        model, tokenizer = language.load(args.model, device="cuda" if torch.cuda.is_available() else "cpu")
    model.set_attn_implementation("sdpa" if args.stock else f"sage_{args.recipe}")  # the one line
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    said: list[dict] = []
    while question := (args.question or input("> ")):
        said.append({"role": "user", "content": question})
        ids = language.chat_ids(tokenizer, said).to(model.device)
        if room is not None and ids.shape[1] >= room:
            print(f"The conversation has {ids.shape[1]} tokens, and this model has no more than {room} positions.")
            break
        new_tokens = args.new_tokens if room is None else min(args.new_tokens, room - ids.shape[1])
        cache = DynamicCache(config=model.config) if args.stock else sp.Int8KVCache(model.config)
        start = time.perf_counter()
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new_tokens,
            do_sample=False, streamer=streamer,
        )  # fmt: skip
        seconds, answer = time.perf_counter() - start, output[0, ids.shape[1] :]
        held, bf16 = (language.kv_bytes_per_token(cache, dtype) for dtype in (None, torch.bfloat16))
        speed = f"{len(answer)} tokens, {len(answer) / seconds:.1f} tokens/s with the prompt's {ids.shape[1]} read"
        print(f"[{speed}; KV cache {held} bytes a token, {held / bf16:.3f} of bf16]")
        said.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        if args.question:
            break


if __name__ == "__main__":
    main()
