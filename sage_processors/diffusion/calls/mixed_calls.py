"""Attention calls with the recipe "mixed", and the facts about them in reports."""

from __future__ import annotations

from typing import Any

import torch

import sage_kernels
from sage_kernels.facts.block_budget import chosen_share, rows_of_block
from sage_kernels.facts.recipe import MIXED_RECIPE

from ...options import SageAttnProcessor


DONE = {"promote": "promoted to 16 bit", "skip": "skipped"}


def is_mixed(config: SageAttnProcessor) -> bool:
    """True if the options choose the recipe "mixed"."""
    return config.recipe == MIXED_RECIPE


def mixed_options(config: SageAttnProcessor) -> sage_kernels.Mixed:
    """Return the options of the recipe "mixed", or their defaults."""
    return config.mixed or sage_kernels.Mixed()


def attend_mixed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: Any,
    config: SageAttnProcessor, site: Any, return_lse: bool,
) -> Any:  # fmt: skip
    """Run one call of mixed-precision attention.

    query [B, S_q, H, D], key and value [B, S_kv, H_kv, D] -> [B, S_q, H, D]; with return_lse also lse [B, S_q, H].
    Keeps the chosen blocks in `site` if the options keep them.
    """
    keeps = mixed_options(config).keep_blocks and site is not None and not torch.compiler.is_compiling()
    results = sage_kernels.mixed_attention(
        query, key, value, options=mixed_options(config), causal="top_left" if is_causal else False, scale=scale,
        return_lse=return_lse, return_blocks=keeps,
    )  # fmt: skip
    if not keeps:
        return results
    *results, site.blocks = results
    return tuple(results) if return_lse else results[0]


def mixed_facts(config: SageAttnProcessor, sites: Any, device: torch.device) -> dict[str, Any]:
    """Return the facts about a layer's latest mixed call that its row in a report has.

    Keys: base, selector, action, share (of the visible blocks), block_map; the last two are None before a call. Waits
    for the device if blocks are kept.
    """
    options = mixed_options(config)
    facts: dict[str, Any] = {"base": options.base, "selector": options.selector, "action": options.action}
    facts |= {"share": None, "block_map": None}
    site = next((site for site in sites if site.seen_kind is not None), None)
    if site is not None:
        rows, causal = rows_of_block(device, options.base), bool(site.seen_kind[1])
        facts["share"] = chosen_share(int(site.seen_seq_q), int(site.seen_seq_kv), causal, 0, options, rows)
        if site.blocks is not None:
            facts["block_map"] = [[round(x, 4) for x in row] for row in site.blocks.float().mean((0, 1)).tolist()]
    return facts


def mixed_note(facts: dict[str, Any]) -> str:
    """Return the note of a layer's row in a report.

    Such as "5.2 % of its blocks promoted to 16 bit, the others in nvfp4 (block_mean)".
    """
    share = "blocks" if facts["share"] is None else f"{100 * facts['share']:.1f} % of its blocks"
    return f"{share} {DONE[facts['action']]}, the others in {facts['base']} ({facts['selector']})"
