"""Eleven more denoisers at published shapes, some with fewer blocks: cases of suite models beside model_cases.py."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from model_cases import CASES, FLUX_DEV, STEPS, WAN_1_3B, ModelCase, Wan, _sizes


def _grid(height: int, width: int, columns: int = 3) -> torch.Tensor:
    """Positions of image tokens, [height · width, columns]; rows and columns of the image in entries 1 and 2."""
    ids = torch.zeros(height, width, columns)
    ids[..., 1], ids[..., 2] = torch.arange(height)[:, None], torch.arange(width)
    return ids.view(-1, columns)


def _padded(batch: int, tokens: int, padding: int = 40) -> torch.Tensor:
    """Mask [batch, tokens] of a prompt shorter than the longest one: True for tokens that count."""
    return (torch.arange(tokens) < tokens - min(padding, tokens // 4)).expand(batch, tokens)


def _of_tokens(config, sizes, make):
    side, text = sizes["side"], sizes["text"]
    return {
        "hidden_states": make(1, side * side, config["in_channels"]),
        "encoder_hidden_states": make(1, text, config["joint_attention_dim"]),
    }


def _flux2(config, sizes, make):
    ids = {"img_ids": _grid(sizes["side"], sizes["side"], 4), "txt_ids": torch.zeros(sizes["text"], 4)}
    return _of_tokens(config, sizes, make) | ids | {"guidance": torch.tensor([4.0])}


def _chroma(config, sizes, make):
    image, text = sizes["side"] ** 2, sizes["text"]
    mask = torch.cat([_padded(1, text), torch.ones(1, image, dtype=torch.bool)], dim=1)
    ids = {"img_ids": _grid(sizes["side"], sizes["side"]), "txt_ids": torch.zeros(text, 3)}
    return _of_tokens(config, sizes, make) | ids | {"attention_mask": mask}


def _qwen(config, sizes, make):
    mask = torch.ones(1, sizes["text"], dtype=torch.bool)
    shapes = [[(1, sizes["side"], sizes["side"])]]
    return _of_tokens(config, sizes, make) | {"encoder_hidden_states_mask": mask, "img_shapes": shapes}


def _latent(config, sizes, make, text_dim):
    shape = [sizes[name] for name in ("frames", "height", "width") if name in sizes]
    batch = sizes.get("batch", 1)
    return {
        "hidden_states": make(batch, config["in_channels"], *shape),
        "encoder_hidden_states": make(batch, sizes["text"], config[text_dim]),
    }


def _hunyuan(config, sizes, make):
    more = {"pooled_projections": make(1, config["pooled_projection_dim"]), "guidance": torch.tensor([6000.0])}
    return (
        _latent(config, sizes, make, "text_embed_dim") | more | {"encoder_attention_mask": _padded(1, sizes["text"])}
    )


def _mochi(config, sizes, make):
    return _latent(config, sizes, make, "text_embed_dim") | {"encoder_attention_mask": _padded(1, sizes["text"])}


def _cogvideox(config, sizes, make):
    found = _latent(config, sizes, make, "text_embed_dim")
    return found | {"hidden_states": found["hidden_states"].transpose(1, 2).contiguous()}  # [B, frames, C, H, W]


def _ltx(config, sizes, make):
    tokens = sizes["frames"] * sizes["height"] * sizes["width"]
    return {
        "hidden_states": make(1, tokens, config["in_channels"]),
        "encoder_hidden_states": make(1, sizes["text"], config["caption_channels"]),
        "encoder_attention_mask": _padded(1, sizes["text"]).long(),
        "num_frames": sizes["frames"], "height": sizes["height"], "width": sizes["width"],
    }  # fmt: skip


def _sd3(config, sizes, make):
    found = _latent(config, sizes, make, "joint_attention_dim")
    return found | {"pooled_projections": make(sizes["batch"], config["pooled_projection_dim"])}


def _lumina2(config, sizes, make):
    found = _latent(config, sizes, make, "cap_feat_dim")
    return found | {"encoder_attention_mask": _padded(1, sizes["text"])}


def _z_image(config, sizes, make):
    latent = make(config["in_channels"], 1, sizes["height"], sizes["width"])
    return {"x": [latent], "cap_feats": [make(sizes["text"], config["cap_feat_dim"])]}


@dataclass(frozen=True)
class Published(ModelCase):
    """A denoiser of diffusers by its class's name.

    Attributes:
        cls: name of the class.
        given: function of (config, sizes, make) that returns all arguments but the timestep.
        largest: heads, tokens and head_dim of the largest attention.
        times: (name of the timestep argument, its value at the first step and at the last one).
        tiny_changes: (config, sizes) of a tiny model.
    """

    cls: str = ""
    given: object = None
    largest: tuple = (0, 0, 0)
    times: tuple = ("timestep", 1000.0, 0.0)
    tiny_changes: tuple = field(default=({}, {}))

    def build(self):
        import diffusers

        return getattr(diffusers, self.cls)(**self.config)

    def inputs(self, make, step):
        name, first, last = self.times
        found = self.given(self.config, self.sizes, make)
        return found | {name: torch.full((self.sizes.get("batch", 1),), first + (last - first) * step / STEPS)}

    def attention(self):
        heads, tokens, head_dim = self.largest
        return _sizes(self.sizes.get("batch", 1), heads, tokens, head_dim)

    def tiny(self):
        config, sizes = self.tiny_changes
        return dataclasses.replace(self.renamed("tiny"), config=self.config | config, sizes=self.sizes | sizes, reps=1)


# Published configurations, as transformer/config.json of these says: black-forest-labs/FLUX.2-dev,
# hunyuanvideo-community/HunyuanVideo, Wan-AI/Wan2.1-T2V-14B-Diffusers, Qwen/Qwen-Image, Tongyi-MAI/Z-Image-Turbo,
# Lightricks/LTX-Video, stabilityai/stable-diffusion-3.5-large, THUDM/CogVideoX-2b, lodestones/Chroma1-HD,
# genmo/mochi-1-preview, Alpha-VLLM/Lumina-Image-2.0. Numbers of blocks are smaller where a comment says so.
WAN_14B = WAN_1_3B | {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 6}  # of 40
_TINY = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
_ONE = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16}
MODELS = (
    Published(
        "flux2_dev_1024",
        {
            "patch_size": 1, "in_channels": 128, "num_layers": 2, "num_single_layers": 12,  # of 8 and 48
            "attention_head_dim": 128, "num_attention_heads": 48, "joint_attention_dim": 15360,
            "timestep_guidance_channels": 256, "mlp_ratio": 3.0, "axes_dims_rope": (32, 32, 32, 32),
            "rope_theta": 2000,
        },
        {"side": 64, "text": 512},
        cls="Flux2Transformer2DModel", given=_flux2, largest=(48, 4608, 128), times=("timestep", 1.0, 0.0),
        tiny_changes=(_ONE | {"joint_attention_dim": 32, "axes_dims_rope": (4, 4, 4, 4)}, {"side": 6, "text": 16}),
    ),
    Published(
        "hunyuan_544x960x61",
        {
            "in_channels": 16, "out_channels": 16, "num_attention_heads": 24, "attention_head_dim": 128,
            "num_layers": 4, "num_single_layers": 8, "num_refiner_layers": 2,  # of 20 and 40
            "mlp_ratio": 4.0, "patch_size": 2, "patch_size_t": 1, "qk_norm": "rms_norm", "guidance_embeds": True,
            "text_embed_dim": 4096, "pooled_projection_dim": 768, "rope_theta": 256.0, "rope_axes_dim": (16, 56, 56),
        },
        {"frames": 16, "height": 68, "width": 120, "text": 256},
        reps=3, cls="HunyuanVideoTransformer3DModel", given=_hunyuan, largest=(24, 32896, 128),
        tiny_changes=(
            _ONE | {"text_embed_dim": 32, "rope_axes_dim": (4, 4, 8)},
            {"frames": 2, "height": 8, "width": 8, "text": 16},
        ),
    ),
    Wan("wan_14b_480p81", WAN_14B, {"frames": 21, "height": 60, "width": 104, "text": 512}, reps=3),
    Published(
        "qwen_image_1328",
        {
            "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 12,  # of 60
            "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584,
            "axes_dims_rope": (16, 56, 56),
        },
        {"side": 83, "text": 256},
        cls="QwenImageTransformer2DModel", given=_qwen, largest=(24, 7145, 128), times=("timestep", 1.0, 0.0),
        tiny_changes=(_TINY | {"joint_attention_dim": 32, "axes_dims_rope": (8, 4, 4)}, {"side": 6, "text": 16}),
    ),
    Published(
        "z_image_1024",
        {
            "all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 16, "dim": 3840, "n_layers": 30,
            "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30, "norm_eps": 1e-5, "qk_norm": True,
            "cap_feat_dim": 2560, "rope_theta": 256.0, "t_scale": 1000.0, "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
        },
        {"height": 128, "width": 128, "text": 128},
        cls="ZImageTransformer2DModel", given=_z_image, largest=(30, 4224, 128), times=("t", 0.0, 1.0),
        tiny_changes=(
            {"dim": 32, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16,
             "axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32]},
            {"height": 16, "width": 16, "text": 16},
        ),
    ),
    Published(
        "ltx_512x768x121",
        {
            "in_channels": 128, "out_channels": 128, "num_attention_heads": 32, "attention_head_dim": 64,
            "cross_attention_dim": 2048, "num_layers": 28, "caption_channels": 4096,
        },
        {"frames": 16, "height": 16, "width": 24, "text": 128},
        cls="LTXVideoTransformer3DModel", given=_ltx, largest=(32, 6144, 64),
        tiny_changes=(
            _TINY | {"cross_attention_dim": 32, "caption_channels": 16},
            {"frames": 2, "height": 6, "width": 6, "text": 16},
        ),
    ),
    Published(
        "sd35_large_1024",
        {
            "sample_size": 128, "patch_size": 2, "in_channels": 16, "num_layers": 38, "attention_head_dim": 64,
            "num_attention_heads": 38, "joint_attention_dim": 4096, "caption_projection_dim": 2432,
            "pooled_projection_dim": 2048, "out_channels": 16, "pos_embed_max_size": 192, "qk_norm": "rms_norm",
        },
        {"batch": 2, "height": 128, "width": 128, "text": 333},
        cls="SD3Transformer2DModel", given=_sd3, largest=(38, 4429, 64),
        tiny_changes=(
            _TINY | {"joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16},
            {"height": 16, "width": 16, "text": 16},
        ),
    ),
    Published(
        "cogvideox_49",
        {
            "num_attention_heads": 30, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16,
            "text_embed_dim": 4096, "num_layers": 8, "sample_width": 90, "sample_height": 60,  # of 30 blocks
            "sample_frames": 49, "max_text_seq_length": 226,
        },
        {"frames": 13, "height": 60, "width": 90, "text": 226},
        cls="CogVideoXTransformer3DModel", given=_cogvideox, largest=(30, 17776, 64),
        tiny_changes=(
            _TINY | {"text_embed_dim": 16, "time_embed_dim": 8, "sample_width": 8, "sample_height": 8,
                     "sample_frames": 5, "max_text_seq_length": 16},
            {"frames": 2, "height": 8, "width": 8, "text": 16},
        ),
    ),
    Published(
        "chroma_1024",
        {
            "patch_size": 1, "in_channels": 64, "num_layers": 6, "num_single_layers": 12,  # of 19 and 38
            "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 4096,
            "axes_dims_rope": FLUX_DEV["axes_dims_rope"],
        },
        {"side": 64, "text": 512},
        cls="ChromaTransformer2DModel", given=_chroma, largest=(24, 4608, 128), times=("timestep", 1.0, 0.0),
        tiny_changes=(
            _ONE | {"joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8,
                    "approximator_hidden_dim": 16, "approximator_layers": 1},
            {"side": 6, "text": 16},
        ),
    ),
    Published(
        "mochi",
        {
            "patch_size": 2, "num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 12,  # of 48
            "pooled_projection_dim": 1536, "in_channels": 12, "text_embed_dim": 4096, "time_embed_dim": 256,
            "max_sequence_length": 256,
        },
        {"frames": 11, "height": 60, "width": 106, "text": 256},  # 61 frames at 480 x 848
        cls="MochiTransformer3DModel", given=_mochi, largest=(24, 17746, 128),
        tiny_changes=(
            _TINY | {"num_layers": 2, "pooled_projection_dim": 16, "text_embed_dim": 16, "time_embed_dim": 4,
                     "max_sequence_length": 16},
            {"frames": 2, "height": 8, "width": 8, "text": 16},
        ),
    ),
    Published(
        "lumina2_1024",
        {
            "sample_size": 128, "patch_size": 2, "in_channels": 16, "hidden_size": 2304, "num_layers": 26,
            "num_refiner_layers": 2, "num_attention_heads": 24, "num_kv_heads": 8, "multiple_of": 256,
            "axes_dim_rope": (32, 32, 32), "axes_lens": (300, 512, 512), "cap_feat_dim": 2304,
        },
        {"height": 128, "width": 128, "text": 256},
        cls="Lumina2Transformer2DModel", given=_lumina2, largest=(24, 4352, 96), times=("timestep", 0.0, 1.0),
        tiny_changes=(
            {"sample_size": 16, "hidden_size": 32, "num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 4,
             "num_kv_heads": 2, "multiple_of": 2, "axes_dim_rope": (4, 2, 2), "axes_lens": (128, 128, 128),
             "cap_feat_dim": 32},
            {"height": 16, "width": 16, "text": 16},
        ),
    ),
)  # fmt: skip
SUITE = {case.name: case for case in (*MODELS, *(CASES[x] for x in ("flux_1024", "sdxl_1024", "wan21_1_3b_480p81")))}
