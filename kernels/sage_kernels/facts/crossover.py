"""The table of sizes from which INT8 attention is faster than 16-bit attention.

The diffusers and the transformers side ask it; the ops do not. INT8 halves the time of one of the two matmuls and pays
for it with a pass over K, a launch, and quantising Q in every program. A short call, or one with little work in all,
does not earn that back. On a CPU everything runs in INT8: the reference is there to check numbers, not for speed.

This module loads torch._dynamo, so `import sage_kernels` leaves it out.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .recipe import DEFAULT_RECIPE, FP8_RECIPE, INT8_RECIPE, MIXED_RECIPE, RECIPES


ANY_GPU = "any GPU"
CUDNN, FLASH = "torch_sdpa_cudnn", "torch_sdpa_flash"
# INT8 has at least this share of the 16-bit provider's speed in the measurements that a row names as evidence.
BREAK_EVEN = 0.97
NEVER = 2**62


class Crossover(NamedTuple):
    """One row of the table. The first row that fits a call counts.

    Attributes:
        gpu: class of GPUs, see `gpu_class`, or ANY_GPU.
        head_dim: largest head_dim that the row is for.
        recipe: a key of RECIPES.
        causal: rows see keys up to their own number.
        tokens: fewest queries, and fewest keys, of a call that is worth it.
        scores: fewest scores of all its heads and samples, B · H · S_q · S_kv.
        against: the 16-bit provider that INT8 is compared with: cuDNN where a user may choose it; flash where
            SDPA chooses by itself (Hopper).
        evidence: cases of benchmarks/results.csv in which INT8 is worth it. Empty: not measured, hence cautious.
    """

    gpu: str
    head_dim: int
    recipe: str
    causal: bool
    tokens: int
    scores: int
    against: str
    evidence: tuple[str, ...] = ()


_FLUX_1024 = 24 * 4608**2  # scores; half as many at 4,096 tokens were not worth it: D128_N4096_full_BH16

# Filled from `bench.py --set crossover` and `--set all`. tests/kernels/test_crossover.py compares every row with its
# evidence: the row's number of tokens is that of the shortest measured case, so nothing is interpolated.
_16_BIT_PV = (
    Crossover(
        "hopper", 64, DEFAULT_RECIPE, False, 4096, 2**30, CUDNN,
        ("D64_N4096_full", "D64_N8192_full", "D64_N8192_full_BH16", "D64_N16384_full_BH16", "cogvideox_49"),
    ),
    # not measured: exponentials, which INT8 does not speed up, weigh twice as much as at head_dim 128
    Crossover("hopper", 64, DEFAULT_RECIPE, True, 16384, 2**31, FLASH),
    Crossover(
        "hopper", 128, DEFAULT_RECIPE, False, 4096, _FLUX_1024, CUDNN,
        ("D128_N4096_full", "flux_1024", "D128_N8192_full", "D128_N8192_full_BH16", "D128_N16384_full",
         "qwen_image_1328"),
    ),
    # causal calls are those of language models: a scale per token, against the backend that SDPA chooses
    Crossover(
        "hopper", 128, DEFAULT_RECIPE, True, 8192, 2**30, FLASH,
        ("D128_N8192_causal/per_token", "D128_N16384_causal/per_token", "llama3_8b_prefill/per_token"),
    ),
    Crossover("hopper", 256, DEFAULT_RECIPE, False, 16384, 2**31, CUDNN),  # not measured
    Crossover("hopper", 256, DEFAULT_RECIPE, True, 16384, 2**31, FLASH),  # not measured
    # not measured on any other GPU. There SDPA runs flash, which is slower than cuDNN on Hopper
    Crossover(ANY_GPU, 256, DEFAULT_RECIPE, False, 4096, 2**28, FLASH),
    Crossover(ANY_GPU, 256, DEFAULT_RECIPE, True, 4096, 2**28, FLASH),
)  # fmt: skip
_FP8_PV = (
    Crossover(
        "hopper", 64, FP8_RECIPE, False, 8192, 2**32, CUDNN,
        ("D64_N8192_full", "D64_N16384_full", "D64_N16384_full_BH16"),
    ),
    Crossover(
        "hopper", 128, FP8_RECIPE, False, 8192, 2**30, CUDNN,
        ("D128_N8192_full", "D128_N8192_full_BH16", "D128_N16384_full"),
    ),
    # not measured: the rows of the recipe with P and V in 16 bit
    *(row._replace(recipe=FP8_RECIPE, evidence=()) for row in _16_BIT_PV if row.causal or row.head_dim == 256),
)  # fmt: skip
_INT8_PV = (
    # at 4,096 tokens slower than 16-bit attention, at both widths
    Crossover("hopper", 64, INT8_RECIPE, False, 16384, 2**34, CUDNN, ("D64_N16384_full",)),
    Crossover("hopper", 64, INT8_RECIPE, True, 16384, 2**31, FLASH),  # not measured
    Crossover("hopper", 128, INT8_RECIPE, False, 8192, 2**32, CUDNN, ("D128_N8192_full", "D128_N16384_full")),
    Crossover("hopper", 128, INT8_RECIPE, True, 8192, 2**32, FLASH, ("D128_N8192_causal", "D128_N16384_causal")),
    Crossover("hopper", 256, INT8_RECIPE, False, NEVER, NEVER, CUDNN),
    Crossover("hopper", 256, INT8_RECIPE, True, NEVER, NEVER, FLASH),
    # not measured: the rows of the recipe with P and V in 16 bit
    *(row._replace(recipe=INT8_RECIPE) for row in _16_BIT_PV if row.gpu == ANY_GPU),
)
# recipes for comparison: not timed, and Hopper's own kernel has no FP8 scores
_STUDIED = tuple(
    Crossover(ANY_GPU, 256, name, causal, NEVER, NEVER, FLASH if causal else CUDNN)
    for name, recipe in RECIPES.items()
    for causal in (False, True)
    if recipe.study
)
CROSSOVERS = _16_BIT_PV + _FP8_PV + _INT8_PV + _STUDIED


def find_crossover(gpu: str, head_dim: int, recipe: str, causal: bool) -> Crossover:
    """Return the row for a call. A recipe without a row is never worth it: nothing is known of it."""
    for row in CROSSOVERS:
        if row.gpu in (gpu, ANY_GPU) and head_dim <= row.head_dim and (row.recipe, row.causal) == (recipe, causal):
            return row
    return Crossover(gpu, head_dim, recipe, causal, NEVER, NEVER, CUDNN)


def gpu_class(device: torch.device) -> str | None:
    """Return the class of GPUs that the table names; None for a CPU.

    "ampere" (compute capability 8.0 to 8.7), "ada" (8.9), "hopper" (9), "blackwell" (10, 11), "consumer_blackwell"
    (12), "amd".
    """
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "amd"
    major, minor = torch.cuda.get_device_capability(device)
    if major == 8:
        return "ada" if minor == 9 else "ampere"
    return {9: "hopper", 10: "blackwell", 11: "blackwell"}.get(major, "consumer_blackwell")


def is_measured(device: torch.device) -> bool:
    """Return True if the table has measured rows of the class of this GPU; True for a CPU."""
    gpu = gpu_class(device)
    return gpu is None or any(row.gpu == gpu and row.evidence for row in CROSSOVERS)


@functools.cache
def _limits(device: torch.device, head_dim: int, recipe: str, causal: bool) -> tuple[int, int]:
    """(tokens, scores): a call on this device with fewer of either is short."""
    gpu = gpu_class(device)
    if gpu is None:
        return 0, 0
    row = find_crossover(gpu, head_dim, recipe, causal)
    return row.tokens, row.scores


# traced code asks once, while it is traced: the answer depends on the arguments alone
_traced_limits = torch.compiler.assume_constant_result(lambda *arguments: _limits(*arguments))


def is_short(
    device: torch.device,
    *,
    batch: int,
    heads: int,
    seq_q: int,
    seq_kv: int,
    head_dim: int,
    causal: bool = False,
    recipe: str = DEFAULT_RECIPE,
    min_tokens: int | None = None,
) -> bool:
    """Return True if 16-bit attention is faster than INT8 for a call of these sizes.

    No device sync, traceable by Dynamo.

    Args:
        device: where the tensors are.
        batch, heads, seq_q, seq_kv, head_dim: B, H (query heads), S_q, S_kv, D.
        causal: rows see keys up to their own number, by a flag or by a mask.
        recipe: a key of RECIPES, or "mixed".
        min_tokens: fewest queries, and fewest keys, of a call that is not short, in place of the table's; 0: no call
            is short. None: the table decides.
    """
    if recipe == MIXED_RECIPE:  # not timed: no faster than all blocks in INT8
        recipe = DEFAULT_RECIPE
    if min_tokens is not None:
        return seq_q < min_tokens or seq_kv < min_tokens
    limits = _traced_limits if torch.compiler.is_compiling() else _limits
    tokens, scores = limits(device, head_dim, recipe, causal)
    return seq_q < tokens or seq_kv < tokens or batch * heads * seq_q * seq_kv < scores
