"""Wan's VAE on a clip at once: what AutoencoderKLWan computes frame by frame, in a tenth of the kernels.

diffusers hands its VAE one latent frame at a time and carries what causal convolutions need of earlier ones, which
saves memory. Training keeps all of it anyway, and thousands of small kernels wait for the host. The numbers are the
same but for rounding: a causal convolution over all frames is one over parts that are handed the two frames before.
Only the two changes of frame rate know which part is the first; here they are told by place.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify


def prepare(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Let `moments` and `decode` work on this VAE; its own `encode` and `decode` stay as they are."""
    for module in vae.modules():
        if isinstance(module, WanResample) and module.mode.endswith("3d"):
            module.forward = _Resample(module)
    return vae


def moments(vae: AutoencoderKLWan, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log of the variance, each [B, channels, t, h, w], of clips [B, 3, 1 + 4·n, H, W] in [-1, 1]."""
    found = vae.quant_conv(vae.encoder(patchify(clips, vae.config.patch_size)))
    mean, logvar = found.chunk(2, dim=1)
    return mean, logvar.clamp(-30, 20)  # as DiagonalGaussianDistribution


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Clips [B, 3, T, H, W] of latents, not clamped to [-1, 1]: beyond it there is a gradient, too."""
    drawn = vae.decoder(vae.post_quant_conv(latents), first_chunk=True)
    return unpatchify(drawn, vae.config.patch_size)


class _Resample:
    """WanResample's forward for whole clips; with a cache of features it is the module's own."""

    def __init__(self, module: WanResample):
        self.module, self.own = module, module.forward

    def __call__(self, x: torch.Tensor, feat_cache=None, feat_idx=(0,)) -> torch.Tensor:
        if feat_cache is not None:
            return self.own(x, feat_cache, feat_idx)
        first, rest = x[:, :, :1], x[:, :, 1:]
        if self.module.mode == "downsample3d":
            x = self._spatial(x)
            # the first frame stays alone, every two later ones become one, seen with the frame before them
            return torch.cat([x[:, :, :1], self.module.time_conv(x)], 2) if rest.shape[2] else x
        if rest.shape[2]:
            batch, channels, frames, height, width = rest.shape
            rest = self.module.time_conv(rest).view(batch, 2, channels, frames, height, width)
            rest = torch.stack((rest[:, 0], rest[:, 1]), 3).reshape(batch, channels, 2 * frames, height, width)
        return self._spatial(torch.cat([first, rest], 2))

    def _spatial(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, frames, height, width = x.shape
        x = self.module.resample(x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width))
        return x.view(batch, frames, *x.shape[1:]).permute(0, 2, 1, 3, 4)
