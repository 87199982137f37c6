"""Video and audio transformers of tests/support/tiny_models.py."""

from __future__ import annotations

import torch

from tests.support.tiny_models import model, rand, t


# fmt: off
# Tables of numbers: one entry a line would make them four times as long.


_WAN = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4,
    "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 1, "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32,
}


def _video_inputs(channels=4, frames=2, side=8, text=12, text_dim=16):
    shape = (1, channels, frames, side, side)
    return {"hidden_states": rand(*shape), "encoder_hidden_states": rand(1, text, text_dim), "timestep": t()}


@model("WanTransformer3DModel")
def wan_t2v():
    return _WAN, _video_inputs()


@model("WanTransformer3DModel")
def wan_i2v():
    config = _WAN | {"image_dim": 8, "added_kv_proj_dim": 32}
    # diffusers splits the image tokens off a context of 512 text tokens
    return config, _video_inputs(text=512) | {"encoder_hidden_states_image": rand(1, 9, 8)}


@model("WanVACETransformer3DModel")
def wan_vace():
    inputs = _video_inputs() | {"control_hidden_states": rand(1, 12, 2, 8, 8)}
    return _WAN | {"num_layers": 2, "vace_layers": [0], "vace_in_channels": 12}, inputs


@model("SkyReelsV2Transformer3DModel")
def skyreels():
    return _WAN, _video_inputs()


@model("ChronoEditTransformer3DModel")
def chrono_edit():
    return _WAN | {"rope_temporal_skip_len": 8}, _video_inputs()


_COGVIDEO = {
    "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2,
    "text_embed_dim": 8, "num_layers": 1, "sample_width": 8, "sample_height": 8, "sample_frames": 8, "patch_size": 2,
    "temporal_compression_ratio": 4, "max_text_seq_length": 8,
}


@model("CogVideoXTransformer3DModel")
def cogvideox():
    return _COGVIDEO, {"hidden_states": rand(1, 3, 4, 8, 8), "encoder_hidden_states": rand(1, 8, 8), "timestep": t()}


@model("ConsisIDTransformer3DModel")
def consisid():
    config = _COGVIDEO | {
        "cross_attn_interval": 1, "is_kps": False, "is_train_face": True, "cross_attn_dim_head": 8,
        "cross_attn_num_heads": 1, "LFE_id_dim": 2, "LFE_vit_dim": 2, "LFE_depth": 5, "LFE_dim_head": 8,
        "LFE_num_heads": 2, "LFE_num_id_token": 1, "LFE_num_querie": 1, "LFE_output_dim": 21, "LFE_ff_mult": 1,
        "LFE_num_scale": 1,
    }
    inputs = {"hidden_states": rand(1, 1, 4, 8, 8), "encoder_hidden_states": rand(1, 8, 8), "timestep": t()}
    return config, inputs | {"id_vit_hidden": [torch.ones(1, 2, 2)], "id_cond": torch.ones(1, 2)}


@model("LTXVideoTransformer3DModel")
def ltx():
    config = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
        "cross_attention_dim": 16, "num_layers": 1, "caption_channels": 16,
    }
    inputs = {
        "hidden_states": rand(1, 2 * 6 * 6, 4), "encoder_hidden_states": rand(1, 16, 16), "timestep": t(),
        "num_frames": 2, "height": 6, "width": 6, "encoder_attention_mask": (torch.arange(16) < 12).long()[None],
    }
    return config, inputs


@model("HunyuanVideoTransformer3DModel")
def hunyuan_video():
    config = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
        "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2, "patch_size_t": 1, "guidance_embeds": True,
        "text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 8),
    }
    inputs = _video_inputs() | {"pooled_projections": rand(1, 8), "encoder_attention_mask": torch.ones(1, 12),
        "guidance": t(6000.0)}
    return config, inputs


@model("EasyAnimateTransformer3DModel")
def easy_animate():
    config = {
        "attention_head_dim": 16, "num_attention_heads": 2, "in_channels": 4, "mmdit_layers": 1, "num_layers": 2,
        "out_channels": 4,
        "patch_size": 2, "sample_height": 60, "sample_width": 90, "text_embed_dim": 16, "time_embed_dim": 8,
    }
    return config, _video_inputs()


@model("MochiTransformer3DModel")
def mochi():
    config = {
        "patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
        "pooled_projection_dim": 16, "in_channels": 4,
        "text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 16,
    }
    return config, _video_inputs(text=16) | {"encoder_attention_mask": torch.arange(16)[None] < 13}


@model("AllegroTransformer3DModel")
def allegro():
    config = {
        "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 4, "out_channels": 4, "num_layers": 1,
        "cross_attention_dim": 48, "sample_width": 8, "sample_height": 8, "sample_frames": 8, "caption_channels": 8,
    }
    inputs = _video_inputs(text_dim=8)
    place = torch.arange(32)
    angle = torch.arange(4)[:, None] * rand(1, 8)
    rotary = ((angle.cos(), angle.sin()),) * 3
    return config, inputs | {"image_rotary_emb": (rotary, [p[None] for p in (place // 16, place // 4 % 4, place % 4)])}


@model("LatteTransformer3DModel")
def latte():
    config = {
        "sample_size": 8, "num_layers": 1, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 2,
        "caption_channels": 8, "in_channels": 4, "cross_attention_dim": 16, "out_channels": 8, "attention_bias": True,
        "num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
        "video_length": 2,
    }
    return config, _video_inputs(text_dim=8)


@model("CosmosTransformer3DModel")
def cosmos():
    config = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
        "mlp_ratio": 2,
        "text_embed_dim": 16, "adaln_lora_dim": 4, "max_size": (4, 32, 32), "patch_size": (1, 2, 2),
        "extra_pos_embed_type": None,
        "concat_padding_mask": False,  # resizing it needs torchvision
    }
    return config, _video_inputs(frames=1) | {"fps": 30}


@model("Kandinsky5Transformer3DModel")
def kandinsky5():
    config = {
        "in_visual_dim": 4, "in_text_dim": 8, "in_text_dim2": 8, "time_dim": 16, "out_visual_dim": 4,
        "patch_size": (1, 2, 2), "model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 1,
        "axes_dims": (4, 4, 8), "visual_cond": False, "attention_type": "regular",
    }
    inputs = {
        "hidden_states": rand(1, 2, 8, 8, 4), "encoder_hidden_states": rand(1, 6, 8), "pooled_projections": rand(1,
            8), "timestep": t(),
        "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)], "text_rope_pos": torch.arange(6),
    }
    return config, inputs


@model("StableAudioDiTModel")
def stable_audio():
    config = {
        "sample_size": 4, "in_channels": 3, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
        "num_key_value_attention_heads": 1, "out_channels": 3, "cross_attention_dim": 8, "time_proj_dim": 8,
        "global_states_input_dim": 16, "cross_attention_input_dim": 8,
    }
    rotary = rand(18, 4)
    inputs = {
        "hidden_states": rand(1, 3, 16), "timestep": t(0.5), "encoder_hidden_states": rand(1, 5, 8),
        "global_hidden_states": rand(1, 1, 16), "rotary_embedding": (rotary.cos()[:17], rotary.sin()[:17]),
    }
    return config, inputs


@model("AceStepTransformer1DModel")
def ace_step_gqa():
    config = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8, "in_channels": 24, "audio_acoustic_hidden_dim": 8, "patch_size": 2, "sliding_window": 16,
    }
    inputs = {
        "hidden_states": rand(1, 16, 8), "timestep": t(0.5), "timestep_r": t(0.5),
        "encoder_hidden_states": rand(1, 10, 32), "context_latents": rand(1, 16, 16),
    }
    return config, inputs
