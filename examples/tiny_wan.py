"""`tiny_wan` before training: diffusers' own WanPipeline from small configs, and its initial weights.

A WanTransformer3DModel (3D rotary embedding, patches of 1x2x2, cross-attention to the text, heads of 64 channels), an
AutoencoderKLWan that makes 2 frames of 4x4 pixels one latent of 8 channels, a UMT5 encoder with a vocabulary of the
captions' words, and flow matching. A clip of 17 frames of 64x64 pixels is 576 tokens, of 33 frames of 128x128 4,352.
"""

from __future__ import annotations

import tiny_whole_clips as whole_clips
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResidualBlock
from tiny_models import t5_tokenizer
from tiny_videos import captions
from transformers import UMT5Config, UMT5EncoderModel


NAME = "tiny_wan"
TEXT_TOKENS = 32
TEXT_WIDTH = 64
LATENT_CHANNELS = 8
FRAME_SCALE, PIXEL_SCALE = 2, 4  # frames and pixels a side of one latent
NEIGHBOUR_BIAS = 5.0  # of a score: nine tenths of the attention over a dozen words
SHIFT = 3.0  # of the noise levels when sampling, as Wan's at 480p
# width: of the transformer, in heads of 64; channels: of the VAE's encoder and decoder
SIZES = {
    "full": {"heads": 3, "layers": 6, "ffn": 512, "channels": (24, 32)},
    "probe": {"heads": 1, "layers": 4, "ffn": 128, "channels": (16, 16)},  # what a CPU can train, to try things out
}


def build(size: str = "full") -> WanPipeline:
    """An untrained pipeline, fp32 on the CPU. size: of SIZES."""
    chosen, tokenizer = SIZES[size], t5_tokenizer(captions())
    encoder_channels, decoder_channels = chosen["channels"]
    text = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=32,
        d_ff=128,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        is_encoder_decoder=False,
        use_cache=False,
    )
    vae = AutoencoderKLWan(
        base_dim=encoder_channels,
        decoder_base_dim=decoder_channels,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[True],  # diffusers' spelling
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
        # Wan 2.2's shortcuts around changes of resolution: without them flat colours take several times as many steps
        is_residual=True,
        patch_size=2,  # with it, three channels of 2x2 pixels are twelve of one
        in_channels=12,
        out_channels=12,
        scale_factor_temporal=FRAME_SCALE,
        scale_factor_spatial=PIXEL_SCALE,
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=chosen["heads"],
        attention_head_dim=64,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=chosen["ffn"],
        num_layers=chosen["layers"],
        rope_max_seq_len=128,
    )
    start_as_identity(transformer)
    start_plainly(vae)
    encoder = UMT5EncoderModel(text)
    start_with_neighbours(encoder)
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=whole_clips.prepare(vae),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=transformer,
    )


@torch.no_grad()
def start_as_identity(transformer: WanTransformer3DModel) -> None:
    """Let every block start as the identity (the zero initialisation of DiT); diffusers leaves it to trainers."""
    for parameter in (*transformer.condition_embedder.time_proj.parameters(), *transformer.proj_out.parameters()):
        parameter.zero_()
    for block in transformer.blocks:
        block.scale_shift_table.zero_()  # gates of attention and feed-forward
        block.attn2.to_out[0].weight.zero_()  # the text's attention has no gate
        block.attn2.to_out[0].bias.zero_()


@torch.no_grad()
def start_plainly(vae: AutoencoderKLWan) -> None:
    """Let the VAE start with its shortcuts alone, and latents with little noise.

    Noise of deviation 1, the usual start, drowns what the encoder says. Without the branches beside its shortcuts a
    net bears a higher rate.
    """
    vae.quant_conv.bias[LATENT_CHANNELS:] = -6.0  # log of the variance
    for module in vae.modules():
        last = {WanResidualBlock: "conv2", WanAttentionBlock: "proj"}.get(type(module))
        if last:
            for parameter in getattr(module, last).parameters():
                parameter.zero_()


@torch.no_grad()
def start_with_neighbours(encoder: UMT5EncoderModel) -> None:
    """Let one head read the next word and one the word before, which tell whose colour a colour is.

    A bias for relative places starts near zero, and a softmax needs one of several units: thousands of steps in which
    the colours of shape, bar and background are told apart by nothing.
    """
    for block in encoder.encoder.block:
        attention = block.layer[0].SelfAttention
        after, before = attention._relative_position_bucket(torch.tensor([1, -1])).tolist()
        bias = attention.relative_attention_bias.weight  # [buckets, heads]
        bias[after, 0] += NEIGHBOUR_BIAS
        bias[before, 1] += NEIGHBOUR_BIAS


def encode(vae: AutoencoderKLWan, clips: torch.Tensor) -> torch.Tensor:
    """Latents as the transformer sees them, fp32 [B, 8, t, h, w], of clips [B, 3, 1 + 4·n, H, W] in [-1, 1]."""
    latents, _ = whole_clips.moments(vae, clips)
    mean, std = _statistics(vae, latents.device)
    return (latents.float() - mean) / std


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Clips [B, 3, T, H, W] in [-1, 1] of what `encode` returned."""
    mean, std = _statistics(vae, latents.device)
    return whole_clips.decode(vae, latents * std + mean).clamp(-1, 1)


def latent_shape(clips: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the latents of clips [B, 3, T, H, W]."""
    batch, _, frames, height, width = clips
    latent_frames = 1 + (frames - 1) // FRAME_SCALE
    return batch, LATENT_CHANNELS, latent_frames, height // PIXEL_SCALE, width // PIXEL_SCALE


def statistics(vae: AutoencoderKLWan) -> tuple[list[float], list[float]]:
    """Mean and deviation of each latent channel, from the config."""
    return vae.config.latents_mean, vae.config.latents_std


def _statistics(vae: AutoencoderKLWan, device: torch.device) -> list[torch.Tensor]:
    return [torch.tensor(values, device=device).view(1, -1, 1, 1, 1) for values in statistics(vae)]


def text_states(encoder: UMT5EncoderModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """What WanPipeline hands to its transformer, fp32 [B, S, 64]: zeros where there is no text."""
    # a mask of four dimensions is added as it is; of one of two the encoder asks the device whether it says anything
    hidden = encoder(ids, (mask[:, None, None].float() - 1) * 1e4).last_hidden_state
    return hidden.float() * mask[..., None]
