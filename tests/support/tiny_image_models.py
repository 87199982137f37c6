"""Image transformers of tests/support/tiny_models.py."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import OLDEST, model, rand, t


# fmt: off
# Tables of numbers: one entry a line would make them four times as long.


@model("SD3Transformer2DModel")
def sd3():
    config = {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 2, "caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 64,
        "out_channels": 4, "pos_embed_max_size": 16,
    }
    inputs = {"hidden_states": rand(1, 4, 16, 16), "encoder_hidden_states": rand(1, 13, 32), "timestep": t()}
    return config, inputs | {"pooled_projections": rand(1, 64)}


@model("SD3Transformer2DModel")
def sd35_dual():
    config, inputs = sd3()
    return config | {"dual_attention_layers": (0,), "qk_norm": "rms_norm"}, inputs


_JOINT = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32,
}


def _joint_inputs(ids=3, text=12, side=6):
    image_ids = torch.zeros(side * side, ids)
    image_ids[:, 1], image_ids[:, 2] = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
    return {
        "hidden_states": rand(1, side * side, 4), "encoder_hidden_states": rand(1, text, 32), "timestep": t(1.0),
        "img_ids": image_ids, "txt_ids": torch.zeros(text, ids),
    }


@model("FluxTransformer2DModel")
def flux():
    config = _JOINT | {"pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}
    return config, _joint_inputs() | {"pooled_projections": rand(1, 32)}


@model("FluxControlNetModel")
def flux_controlnet():
    config, inputs = flux()
    return config, inputs | {"controlnet_cond": rand(1, 36, 4), "conditioning_scale": 1.0, "return_dict": False}


@model("Flux2Transformer2DModel")
def flux2():
    inputs = _joint_inputs(ids=4) | {"guidance": t(1.0)}
    return _JOINT | {"timestep_guidance_channels": 32, "axes_dims_rope": (4, 4, 4, 4)}, inputs


@model("ChromaTransformer2DModel")
def chroma():
    config = {"axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8, "approximator_hidden_dim": 16,
        "approximator_layers": 1}
    return _JOINT | config, _joint_inputs()


@model("BriaTransformer2DModel")
def bria():
    return _JOINT | {"pooled_projection_dim": None, "axes_dims_rope": (0, 8, 8)}, _joint_inputs()


@model("OvisImageTransformer2DModel")
def ovis_image():
    return _JOINT | {"out_channels": 4, "axes_dims_rope": (4, 4, 8)}, _joint_inputs()


@model("LongCatImageTransformer2DModel")
def longcat_image():
    return _JOINT | {"pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)}, _joint_inputs() | {"guidance": t(3.5)}


def _qwen(text_mask):
    config = {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "attention_head_dim": 16,
        "num_attention_heads": 2, "joint_attention_dim": 16, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
    }
    inputs = {
        "hidden_states": rand(1, 36, 16), "encoder_hidden_states": rand(1, 8, 16),
        "encoder_hidden_states_mask": text_mask, "timestep": t(1.0), "img_shapes": [(1, 6, 6)],
    }
    if OLDEST:
        inputs["txt_seq_lens"] = [8]
    return config, inputs


@model("QwenImageTransformer2DModel")
def qwen_image():
    return _qwen(None)


@model("QwenImageTransformer2DModel")
def qwen_image_padded():
    return _qwen((torch.arange(8) < 6).long()[None])


_PIXART = {
    "sample_size": 8, "num_layers": 1, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 2,
    "in_channels": 4, "cross_attention_dim": 16, "out_channels": 8, "num_embeds_ada_norm": 1000, "caption_channels": 8,
}


@model("PixArtTransformer2DModel")
def pixart():
    inputs = {"hidden_states": rand(1, 4, 8, 8), "timestep": t(5), "encoder_hidden_states": rand(1, 8, 8)}
    inputs |= {"added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
        "encoder_attention_mask": torch.ones(1, 8)}
    return _PIXART | {"use_additional_conditions": False}, inputs


@model("DiTTransformer2DModel")
def dit():
    config = {"sample_size": 8, "num_layers": 1, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "in_channels": 4}
    return config | {"out_channels": 8}, {"hidden_states": rand(1, 4, 8, 8), "timestep": t(5),
        "class_labels": torch.tensor([3])}


@model("PriorTransformer")
def prior():
    config = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "embedding_dim": 8,
        "num_embeddings": 7}
    inputs = {"hidden_states": rand(1, 8), "timestep": 2, "proj_embedding": rand(1, 8),
        "encoder_hidden_states": rand(1, 7, 8)}
    return config | {"additional_embeddings": 4}, inputs


@model("HunyuanDiT2DModel")
def hunyuan_dit():
    config = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 2, "cross_attention_dim": 8, "cross_attention_dim_t5": 8, "pooled_projection_dim": 4,
        "hidden_size": 16, "text_len": 4, "text_len_t5": 4, "activation_fn": "gelu-approximate",
    }
    inputs = {
        "hidden_states": rand(1, 4, 8, 8), "encoder_hidden_states": rand(1, 4, 8),
        "text_embedding_mask": torch.ones(1, 4),
        "encoder_hidden_states_t5": rand(1, 4, 8), "text_embedding_mask_t5": torch.ones(1, 4), "timestep": t(),
        "image_meta_size": torch.tensor([[1024.0, 1024, 16, 16, 0, 0]]), "style": torch.zeros(1, dtype=torch.long),
        "image_rotary_emb": [torch.ones(16, 8), torch.zeros(16, 8)],
    }
    return config, inputs


@model("LuminaNextDiT2DModel")
def lumina_next():
    config = {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32, "num_layers": 1,
        "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16, "norm_eps": 1e-5, "learn_sigma": False,
        "qk_norm": True, "cross_attention_dim": 32,
    }
    inputs = {
        "hidden_states": rand(1, 4, 16, 16), "encoder_hidden_states": rand(1, 16, 32), "timestep": t(0.5),
        "encoder_mask": torch.ones(1, 16), "image_rotary_emb": torch.polar(torch.ones(384, 384, 4), rand(384, 384, 4)),
        "cross_attention_kwargs": {},
    }
    return config, inputs


@model("Lumina2Transformer2DModel")
def lumina2():
    config = {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 32, "num_layers": 1,
        "num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 2,
        "axes_dim_rope": (4, 2, 2), "axes_lens": (128, 128, 128), "cap_feat_dim": 32,
    }
    inputs = {"hidden_states": rand(1, 4, 16, 16), "encoder_hidden_states": rand(1, 16, 32), "timestep": t(0.5)}
    return config, inputs | {"encoder_attention_mask": torch.ones(1, 16, dtype=torch.bool)}


@model("ZImageTransformer2DModel")
def z_image():
    if OLDEST:
        pytest.skip("the stock model reads memory that it has not written, which our tests fill with NaN")
    config = {
        "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 8, "dim": 32, "n_layers": 1,
        "n_refiner_layers": 1,
        "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32],
    }
    return config, {"x": [rand(8, 1, 16, 16)], "cap_feats": [rand(16, 16)], "t": t(0.5)}


@model("AuraFlowTransformer2DModel")
def aura_flow():
    config = {
        "sample_size": 16, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
        "attention_head_dim": 16, "num_attention_heads": 2, "caption_projection_dim": 32, "joint_attention_dim": 32,
        "out_channels": 4, "pos_embed_max_size": 64,
    }
    return config, {"hidden_states": rand(1, 4, 16, 16), "encoder_hidden_states": rand(1, 12, 32), "timestep": t()}


@model("SanaTransformer2DModel")
def sana():
    config = {
        "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 8,
        "num_attention_heads": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": 8,
        "cross_attention_dim": 16, "caption_channels": 8, "sample_size": 8,
    }
    return config, {"hidden_states": rand(1, 4, 8, 8), "encoder_hidden_states": rand(1, 8, 8), "timestep": t()}


def _cogview_inputs():
    size = torch.tensor([[64, 64]])
    return {
        "hidden_states": rand(1, 4, 8, 8), "encoder_hidden_states": rand(1, 8, 8), "timestep": t(),
        "original_size": size, "target_size": size, "crop_coords": torch.tensor([[0, 0]]),
    }


_COGVIEW = {
    "patch_size": 2, "in_channels": 4, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
    "out_channels": 4, "text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4,
}


@model("CogView3PlusTransformer2DModel")
def cogview3():
    return _COGVIEW | {"pos_embed_max_size": 8, "sample_size": 8}, _cogview_inputs()


@model("CogView4Transformer2DModel")
def cogview4():
    return _COGVIEW, _cogview_inputs()


@model("HiDreamImageTransformer2DModel")
def hidream():
    config = {
        "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1,
        "attention_head_dim": 8, "num_attention_heads": 4, "caption_channels": [8, 4], "text_emb_dim": 8,
        "num_routed_experts": 2, "num_activated_experts": 2, "axes_dims_rope": (4, 2, 2), "max_resolution": (32, 32),
        "llama_layers": (0, 1), "force_inference_output": True,
    }
    inputs = {
        "hidden_states": rand(1, 4, 16, 16), "encoder_hidden_states_t5": rand(1, 8, 8), "timesteps": t(),
        "encoder_hidden_states_llama3": rand(2, 1, 8, 4), "pooled_embeds": rand(1, 8),
    }
    return config, inputs


@model("OmniGenTransformer2DModel")
def omnigen():
    config = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 32,
        "num_layers": 2, "pad_token_id": 0, "vocab_size": 100, "in_channels": 4, "time_step_dim": 4,
        "rope_scaling": {"long_factor": [1, 2, 3, 4], "short_factor": [1, 2, 3, 4]},
    }
    length = 24 + 1 + 16
    inputs = {
        "hidden_states": rand(1, 4, 8, 8), "timestep": t(0.5), "input_ids": torch.randint(0, 10, (1, 24)),
        "input_img_latents": [rand(1, 4, 8, 8)], "input_image_sizes": {0: [[0, 16]]},
        "attention_mask": torch.ones(1, length, length), "position_ids": torch.arange(length)[None],
    }
    return config, inputs


@model("Krea2Transformer2DModel")
def krea2():
    config = {
        "in_channels": 8, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 32, "timestep_embed_dim": 8, "text_hidden_dim": 16, "num_text_layers": 2,
        "text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "axes_dims_rope": (4, 2, 2),
    }
    inputs = {
        "hidden_states": rand(1, 16, 8), "encoder_hidden_states": rand(1, 6, 2, 16), "timestep": t(0.5),
        "position_ids": torch.zeros(22, 3),
    }
    return config, inputs


@model("PRXTransformer2DModel")
def prx():
    config = {"in_channels": 4, "patch_size": 2, "context_in_dim": 32, "hidden_size": 32, "num_heads": 2, "depth": 1,
        "axes_dim": [8, 8]}
    return config, {"hidden_states": rand(1, 4, 16, 16), "encoder_hidden_states": rand(1, 12, 32), "timestep": t(1.0)}


@model("GlmImageTransformer2DModel")
def glm_image():
    config = _COGVIEW | {"condition_dim": 8, "prior_vq_quantizer_codebook_size": 64}
    inputs = {
        "hidden_states": rand(1, 4, 8, 8), "encoder_hidden_states": rand(1, 12, 8),
        "prior_token_id": torch.randint(0, 64, (1,)), "prior_token_drop": torch.zeros(1, dtype=torch.bool),
        "timestep": t(), "target_size": torch.tensor([[8.0, 8.0]]), "crop_coords": torch.zeros(1, 2),
    }
    return config, inputs
