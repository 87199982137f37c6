"""One of two processes that share a language model's heads (`tp_plan="auto"`): `python tensor_parallel.py RANK FILE`.

FILE: where the two meet. Prints a row with relative L2 errors of a decode's logits.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import sage_processors as sp
from sage_processors.diffusion.graphs.model_state import obstacle


PROMPT, TOKENS = 80, 90  # the cache chooses its centre after 64 tokens
LLAMA = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
}  # fmt: skip


def logits(model, ids, cache=None) -> torch.Tensor:
    """Of a prompt, and of further tokens one by one."""
    found = [model(ids[:, :PROMPT], past_key_values=cache, use_cache=True)]
    for i in range(PROMPT, TOKENS):
        found.append(model(ids[:, i : i + 1], past_key_values=found[0].past_key_values, use_cache=True))
    return torch.cat([x.logits for x in found], 1)


def main(rank: int, file: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{file}")
    folder = f"{file}.model"
    if rank == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)
    dist.barrier()
    ids = torch.randint(0, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    alone, split = (
        LlamaForCausalLM.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto"),
    )
    row: dict = {"obstacle": obstacle(split, torch.device("cpu"))}
    with torch.no_grad():
        exact = logits(alone, ids)

        def error(found, wanted=exact):
            return float((found - wanted).norm() / wanted.norm())

        def of_parts(found):
            parts = slice(None, PROMPT), slice(PROMPT, None)
            return [error(found[:, part], exact[:, part]) for part in parts]

        row["stock"] = error(logits(split, ids))
        for model in (alone, split):
            model.set_attn_implementation("sage_int8")
        ours, together = (logits(model, ids, sp.Int8KVCache(model.config)) for model in (alone, split))
        row |= {"together": of_parts(together), "apart": error(together, ours)}
        swap = sp.quantize_linears(split, "int8", min_features=0)
        row["linears"] = str(swap.report())
        row["with_linears"] = of_parts(logits(split, ids, sp.Int8KVCache(split.config)))
    print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
