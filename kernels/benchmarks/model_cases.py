"""Whole models at true shapes with random weights: configurations, inputs, attention sizes."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


STEPS = 50  # of the denoising run from which the forwards take their noise levels


@dataclass(frozen=True)
class ModelCase:
    """One forward of one model.

    Attributes:
        name: of the case in results.csv.
        config: of the model class, as published.
        sizes: of the inputs; the keys depend on the class.
        reps: number of timed forwards.
    """

    name: str
    config: dict
    sizes: dict
    reps: int = 5

    is_denoiser = True
    layer_options = ("num_layers",)  # config entries with numbers of blocks
    tiny_config = {}  # config entries of a tiny model of the same class
    tiny_sizes = {}

    def build(self) -> nn.Module:
        """Return the model with its parameters on the meta device."""
        raise NotImplementedError

    def inputs(self, make, step: int) -> dict:
        """Return the forward's arguments at a denoising step. make(*shape): makes random numbers."""
        raise NotImplementedError

    def attention(self) -> dict:
        """Return the sizes of the largest attention: batch, heads, kv_heads, seq_q, seq_kv, head_dim, causal."""
        raise NotImplementedError

    def int8_calls(self) -> int:
        """Return the number of attention calls in a forward with the largest size."""
        return sum(self.config[name] for name in self.layer_options)

    def thinned(self, layers: int) -> ModelCase:
        """Return the case with at most `layers` blocks of each kind, which is in its name."""
        fewer = {name: _at_most(self.config[name], layers) for name in self.layer_options}
        return dataclasses.replace(self.renamed(f"layers{layers}"), config=self.config | fewer)

    def renamed(self, suffix: str) -> ModelCase:
        """Return the case with a suffix in its name."""
        return dataclasses.replace(self, name=f"{self.name}/{suffix}")

    def tiny(self) -> ModelCase:
        """Return a case of the same class so small that a CPU runs it in a moment, for tests."""
        config, sizes = self.config | self.tiny_config, self.sizes | self.tiny_sizes
        return dataclasses.replace(self.renamed("tiny"), config=config, sizes=sizes, reps=1)


def _at_most(value, limit: int):
    return tuple(min(x, limit) for x in value) if isinstance(value, (tuple, list)) else min(value, limit)


def _sizes(batch, heads, seq, head_dim, *, kv_heads=None, causal=False) -> dict:
    kv_heads = heads if kv_heads is None else kv_heads
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "seq_q": seq, "seq_kv": seq, "head_dim": head_dim,
        "causal": causal,
    }  # fmt: skip


class Wan(ModelCase):
    """sizes: frames, height, width of the latent; text tokens."""

    tiny_config = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 64, "text_dim": 32}
    tiny_sizes = {"frames": 3, "height": 8, "width": 12, "text": 24}

    def build(self):
        from diffusers import WanTransformer3DModel

        return WanTransformer3DModel(**self.config)

    def inputs(self, make, step):
        sizes = self.sizes
        return {
            "hidden_states": make(1, self.config["in_channels"], sizes["frames"], sizes["height"], sizes["width"]),
            "encoder_hidden_states": make(1, sizes["text"], self.config["text_dim"]),
            "timestep": torch.tensor([1000.0 * (1 - step / STEPS)]),
        }

    def attention(self):
        patch = self.config["patch_size"]
        places = (self.sizes[name] // p for name, p in zip(("frames", "height", "width"), patch, strict=True))
        seq = 1
        for number in places:
            seq *= number
        return _sizes(1, self.config["num_attention_heads"], seq, self.config["attention_head_dim"])


class Flux(ModelCase):
    """sizes: side of the latent in patches; text tokens."""

    layer_options = ("num_layers", "num_single_layers")
    tiny_config = {
        "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32,
        "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (8, 12, 12),
    }  # fmt: skip
    tiny_sizes = {"side": 8, "text": 24}

    def build(self):
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel(**self.config)

    def inputs(self, make, step):
        config, side, text = self.config, self.sizes["side"], self.sizes["text"]
        ids = torch.zeros(side, side, 3)
        ids[..., 1], ids[..., 2] = torch.arange(side)[:, None], torch.arange(side)
        return {
            "hidden_states": make(1, side * side, config["in_channels"]),
            "encoder_hidden_states": make(1, text, config["joint_attention_dim"]),
            "pooled_projections": make(1, config["pooled_projection_dim"]),
            "timestep": torch.tensor([1 - step / STEPS]),
            "guidance": torch.tensor([3.5]),
            "img_ids": ids.view(-1, 3),
            "txt_ids": torch.zeros(text, 3),
        }

    def attention(self):
        config, seq = self.config, self.sizes["side"] ** 2 + self.sizes["text"]
        return _sizes(1, config["num_attention_heads"], seq, config["attention_head_dim"])


class SDXL(ModelCase):
    """sizes: batch, side of the latent, text tokens."""

    layer_options = ("transformer_layers_per_block",)
    tiny_config = {
        "block_out_channels": (32, 64, 64), "attention_head_dim": (2, 2, 2), "transformer_layers_per_block": (1, 1, 1),
        "cross_attention_dim": 32, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64,
    }  # fmt: skip
    tiny_sizes = {"side": 24, "text": 16}

    def build(self):
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(**self.config)

    def inputs(self, make, step):
        config, batch, side = self.config, self.sizes["batch"], self.sizes["side"]
        pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
        return {
            "sample": make(batch, config["in_channels"], side, side),
            "timestep": torch.tensor(1000.0 * (1 - step / STEPS)),
            "encoder_hidden_states": make(batch, self.sizes["text"], config["cross_attention_dim"]),
            "added_cond_kwargs": {"text_embeds": make(batch, pooled), "time_ids": make(batch, 6).abs() * 1024},
        }

    def attention(self):
        config = self.config
        heads = config["attention_head_dim"][1]  # of the second level: the first has no attention
        return _sizes(
            self.sizes["batch"], heads, (self.sizes["side"] // 2) ** 2, config["block_out_channels"][1] // heads
        )

    def int8_calls(self):
        blocks, deep = self.config["layers_per_block"], self.config["transformer_layers_per_block"][1]
        return (2 * blocks + 1) * deep  # down, and up with one block more


class Llama(ModelCase):
    """sizes: prompt tokens."""

    is_denoiser = False
    layer_options = ("num_hidden_layers",)
    tiny_config = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
    }  # fmt: skip

    def build(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**self.config))

    def inputs(self, make, step):
        ids = make(1, self.sizes["tokens"]).float().mul(1e4).abs().long() % self.config["vocab_size"]
        return {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}

    def attention(self):
        config = self.config
        return _sizes(
            1, config["num_attention_heads"], self.sizes["tokens"], config["head_dim"],
            kv_heads=config["num_key_value_heads"], causal=True,
        )  # fmt: skip

    def tiny(self):
        return dataclasses.replace(super().tiny(), sizes={"tokens": 24 + self.sizes["tokens"] // 2**12})


# Published configurations, as their files say: transformer/config.json of Wan-AI/Wan2.1-T2V-1.3B-Diffusers and of
# black-forest-labs/FLUX.1-dev, unet/config.json of stabilityai/stable-diffusion-xl-base-1.0, config.json of
# meta-llama/Llama-3.1-8B.
WAN_1_3B = {
    "patch_size": (1, 2, 2), "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16,
    "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 8960, "num_layers": 30, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
}  # fmt: skip
FLUX_DEV = {
    "patch_size": 1, "in_channels": 64, "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128,
    "num_attention_heads": 24, "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}  # fmt: skip
SDXL_BASE = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10), "cross_attention_dim": 2048, "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
# A video of 81 frames at 480 x 832 is a latent of 21 x 60 x 104; a FLUX patch is 16 x 16 pixels.
CASES = {
    case.name: case
    for case in (
        Wan("wan21_1_3b_480p81", WAN_1_3B, {"frames": 21, "height": 60, "width": 104, "text": 512}),
        Flux("flux_1024", FLUX_DEV, {"side": 64, "text": 512}),
        Flux("flux_2048", FLUX_DEV, {"side": 128, "text": 512}),
        SDXL("sdxl_1024", SDXL_BASE, {"batch": 2, "side": 128, "text": 77}, reps=10),
        Llama("llama8b_prefill_512", LLAMA_8B, {"tokens": 512}, reps=20),
        Llama("llama8b_prefill_4096", LLAMA_8B, {"tokens": 4096}, reps=10),
        Llama("llama8b_prefill_32768", LLAMA_8B, {"tokens": 32_768}, reps=3),
        Llama("llama8b_prefill_131072", LLAMA_8B, {"tokens": 131_072}, reps=1),
    )
}


@contextmanager
def parameters_on_meta():
    """Build modules with parameters on the meta device and real buffers (tables of rotary embeddings)."""
    register = nn.Module.register_parameter

    def on_meta(module, name, parameter):
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def make_model(case: ModelCase, device, dtype) -> nn.Module:
    """Return the case's model with random weights.

    Matrices are N(0, 1 / fan in), weights of norms 1, biases 0: so activations stay of order 1.
    """
    with parameters_on_meta():
        model = case.build()
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            values = torch.empty(parameter.shape, device=device, dtype=dtype)
            if values.dim() > 1:
                values.normal_(std=(values[0].numel()) ** -0.5, generator=generator)
            else:
                values.fill_(float(name == "weight"))
            module._parameters[name] = nn.Parameter(values, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model.eval()


def make_inputs(case: ModelCase, step: int, device, dtype) -> dict:
    """Return the forward's arguments on `device`, the same at every step except for the timestep."""
    generator = torch.Generator(device).manual_seed(1)

    def make(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def place(value):
        if isinstance(value, dict):
            return {name: place(x) for name, x in value.items()}
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return place(case.inputs(make, step))
