"""Host memory while a model of some 130 MB is loaded on the CPU: the 8-bit weights and one file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


# The peak is of memory that belongs to the process: pages of files that are only mapped can be dropped at any time.
SCRIPT = """
import sys, threading, torch, sage_processors as sp
from {library} import {kind} as Kind
def own():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024
Kind.from_pretrained(sys.argv[1] + "/tiny", quantization_config=sp.SageConfig(min_features=0))  # imports, pools
peak, done = [0], threading.Event()
def watch():
    while not done.wait(0.0005):
        peak[0] = max(peak[0], own())
thread = threading.Thread(target=watch)
before = own()
thread.start()
options = dict(quantization_config=sp.SageConfig(min_features=0)) if sys.argv[2] == "stock" else dict()
model = Kind.from_pretrained(sys.argv[1] + "/" + sys.argv[2], torch_dtype=torch.bfloat16, **options)
done.set(); thread.join()
held = sum(x.untyped_storage().nbytes() for x in (*model.parameters(), *model.buffers()))
print(peak[0] - before, held)
"""


def build(name, big):
    import torch

    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        width = 512 if big else 64
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "vocab_size": 64, "num_attention_heads": 4}
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=20 if big else 1, num_key_value_heads=4))
        model = model.to(torch.bfloat16)
    else:
        from diffusers import FluxTransformer2DModel

        with torch.device("meta"):
            model = FluxTransformer2DModel(
                num_layers=4 if big else 1, num_single_layers=8 if big else 1, num_attention_heads=4,
                attention_head_dim=128 if big else 16, axes_dims_rope=(32, 48, 48) if big else (4, 6, 6),
                joint_attention_dim=64, pooled_projection_dim=64, in_channels=16,
            ).to(torch.bfloat16)  # fmt: skip
    model.to_empty(device="cpu")
    for x in (*model.parameters(), *model.buffers()):
        torch.nn.init.normal_(x.data, std=0.02)
    return model


@pytest.mark.parametrize(
    ("name", "library", "kind"),
    [("flux", "diffusers", "FluxTransformer2DModel"), ("llama", "transformers", "LlamaForCausalLM")],
)
def test_the_peak_is_the_8_bit_weights_and_one_file(name, library, kind, tmp_path):
    build(name, big=False).save_pretrained(tmp_path / "tiny")
    model = build(name, big=True)
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path / "stock", max_shard_size=size // 6)
    shard = max(file.stat().st_size for file in (tmp_path / "stock").glob("*.safetensors"))
    assert size > 100e6 and shard < size / 4
    command = [sys.executable, "-c", SCRIPT.format(library=library, kind=kind), str(tmp_path), "stock"]
    # else the C library keeps what is freed, and its share depends on the other threads
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, held = map(int, done.stdout.split())
    print(f"{name}: 16 bit {size / 1e6:.1f} MB, held {held / 1e6:.1f}, file {shard / 1e6:.1f}, peak {peak / 1e6:.1f}")
    assert held < 0.6 * size
    assert peak < held + shard + 8e6  # 8 MB: fp32 copies of the largest layer
