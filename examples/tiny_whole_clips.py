"""Run Wan's VAE on a whole clip at once, in a tenth of the kernels that going frame by frame takes.

diffusers hands its VAE one latent frame at a time and carries what causal convolutions need of earlier ones, which
saves memory. Training keeps all of it anyway, and thousands of small kernels wait for the host. The numbers are the
same but for rounding: a causal convolution over all frames is one over parts that are handed the two frames before.
Only the two changes of frame rate know which part is the first; here they are told by place.

Convolutions over frames and pixels are done over pixels, with a frame and the two before it as channels: some versions
of cuDNN have no kernels in 16 bit for the former, and torch then takes clips one by one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample, patchify, unpatchify


def prepare(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Let `moments` and `decode` work on this VAE; its own `encode` and `decode` compute what they did."""
    for module in vae.modules():
        if isinstance(module, WanCausalConv3d):
            module.forward = _Convolution(module)
        elif isinstance(module, WanResample) and module.mode.endswith("3d"):
            module.forward = _Resample(module)
    return vae


def moments(vae: AutoencoderKLWan, clips: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log of the variance, each [B, channels, t, h, w], of clips [B, 3, 1 + 4·n, H, W] in [-1, 1]."""
    found = vae.quant_conv(vae.encoder(_pixels_last(patchify(clips, vae.config.patch_size))))
    mean, logvar = found.chunk(2, dim=1)
    return mean, logvar.clamp(-30, 20)  # as DiagonalGaussianDistribution


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Clips [B, 3, T, H, W] of latents, not clamped to [-1, 1]: beyond it there is a gradient, too."""
    drawn = vae.decoder(vae.post_quant_conv(_pixels_last(latents)), first_chunk=True)
    return unpatchify(drawn.contiguous(), vae.config.patch_size)


def _pixels_last(x: torch.Tensor) -> torch.Tensor:
    """The same values with their channels beside each other in memory, as all that follows has them."""
    return x.contiguous(memory_format=torch.channels_last_3d)


def _frames(x: torch.Tensor) -> torch.Tensor:
    """[B, C, T, H, W] as [B·T, C, H, W]: a view where channels are last in memory."""
    batch, channels, frames, height, width = x.shape
    return x.permute(0, 2, 1, 3, 4).reshape(batch * frames, channels, height, width)


def _clips(x: torch.Tensor, batch: int) -> torch.Tensor:
    """The inverse of `_frames`."""
    return x.unflatten(0, (batch, -1)).permute(0, 2, 1, 3, 4)


class _Convolution:
    """WanCausalConv3d's forward for whole clips; with a cache of frames it is the module's own."""

    def __init__(self, module: WanCausalConv3d):
        self.module, self.own = module, module.forward

    def __call__(self, x: torch.Tensor, *cache: torch.Tensor | None) -> torch.Tensor:
        if cache:
            return self.own(x, *cache)
        weight, stride = self.module.weight, self.module.stride
        width, _, height, _, before, _ = self.module._padding
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # before it is copied
        reach = weight.shape[2]
        if before:
            x = F.pad(x, (0, 0, 0, 0, before, 0))  # pixels beside the picture are for the convolution to add
        made = (x.shape[2] - reach) // stride[0] + 1
        if reach > 1:
            parts = [x[:, :, k : k + (made - 1) * stride[0] + 1 : stride[0]] for k in range(reach)]
            x = torch.cat(parts, 1)
        flat = weight.transpose(1, 2).flatten(1, 2)  # [out, frames · in, height, width]
        drawn = F.conv2d(_frames(x), flat, self.module.bias, stride[1:], (height, width))
        return _clips(drawn, x.shape[0])


class _Resample:
    """WanResample's forward for whole clips; with a cache of features it is the module's own."""

    def __init__(self, module: WanResample):
        self.module, self.own = module, module.forward

    def __call__(self, x: torch.Tensor, feat_cache=None, feat_idx=(0,)) -> torch.Tensor:
        if feat_cache is not None:
            return self.own(x, feat_cache, feat_idx)
        if self.module.mode == "downsample3d":
            x = self._spatial(x)
            # the first frame stays alone, every two later ones become one, seen with the frame before them
            return torch.cat([x[:, :, :1], self.module.time_conv(x)], 2) if x.shape[2] > 1 else x
        if x.shape[2] > 1:
            first, rest = x[:, :, :1], self.module.time_conv(x[:, :, 1:])
            rest = torch.stack(rest.chunk(2, dim=1), 3).flatten(2, 3)  # two frames of each
            x = torch.cat([first, rest], 2)
        return self._spatial(x)

    def _spatial(self, x: torch.Tensor) -> torch.Tensor:
        return _clips(self.module.resample(_frames(x)), x.shape[0])
