"""Llama with a long context: INT8 attention reads the prompt, an INT8 KV cache holds it in half of the memory.

python examples/llama_long_context.py --compare  # offline: the embedded tiny_lm, whose context is short
python examples/llama_long_context.py --file book.txt "Who did it?" --model meta-llama/Llama-3.1-8B-Instruct

--compare answers with stock attention and a 16-bit cache, too, and says how many tokens are the same.
"""

import time

import small_models
import torch
from command_line import CommandLine, text_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import sage_processors as sp
from sage_processors.cli.arguments import at_least
from sage_processors.evaluation import language


def main() -> None:
    line = CommandLine(__doc__, prompt="Which day comes after Monday?")
    line.add_argument("--file", type=text_file, default=__file__, help="the long text")
    line.add_argument("--tokens", type=at_least(1), default=2**17, help="of the text, at most")
    line.add_argument("--new-tokens", type=at_least(1), default=20, help="of the answer, at most")
    line.add_argument("--compare", action="store_true", help="also with stock attention and cache")
    args = line.parse_args()
    with line.loading(small_models.llama) as name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=line.dtype(torch.bfloat16)).to(args.device)
    room = model.config.max_position_embeddings - args.new_tokens - 64  # the question and the marks of a conversation
    text = tokenizer.decode(tokenizer(args.file)["input_ids"][: max(1, min(args.tokens, room))])
    ids = language.chat_ids(tokenizer, [{"role": "user", "content": f"{text}\n{args.prompt}"}]).to(args.device)

    def answer(cache) -> torch.Tensor:
        start, options = time.perf_counter(), {"max_new_tokens": args.new_tokens, "do_sample": False}
        with line.running():
            said = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **options)
        seconds, held = time.perf_counter() - start, language.kv_bytes_per_token(cache)
        print(
            f"{ids.shape[1]} tokens read, {said.shape[1] - ids.shape[1]} written in {seconds:.2f} s; "
            f"KV cache {held} bytes a token, {held / language.kv_bytes_per_token(cache, torch.bfloat16):.3f} of bf16"
        )
        return said[0, ids.shape[1] :]  # fmt: skip

    stock = answer(DynamicCache(config=model.config)) if args.compare else None
    model.set_attn_implementation(line.implementation())  # the one line, for prompts
    ours = answer(sp.Int8KVCache(model.config))  # and the one for the cache
    sp.attention_report(model).print()
    print(f"Answer: {tokenizer.decode(ours, skip_special_tokens=True)}")
    if stock is not None:
        same = next((i for i, (a, b) in enumerate(zip(ours, stock, strict=False)) if a != b), len(ours))
        print(f"The first {same} of {len(ours)} tokens are those of stock attention")


if __name__ == "__main__":
    main()
