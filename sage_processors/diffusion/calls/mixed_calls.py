"""Calls of layers with the recipe "mixed", and what the report says of them."""

from __future__ import annotations

from typing import Any

import torch

import sage_kernels
from sage_kernels.facts.block_budget import chosen_share, rows_of_block
from sage_kernels.facts.recipe import MIXED_RECIPE

from ...options import SageAttnProcessor


DONE = {"promote": "promoted to 16 bit", "skip": "skipped"}


def is_mixed(config: SageAttnProcessor) -> bool:
    return config.recipe == MIXED_RECIPE


def mixed_options(config: SageAttnProcessor) -> sage_kernels.Mixed:
    return config.mixed or sage_kernels.Mixed()


def attend_mixed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: Any,
    config: SageAttnProcessor, site: Any, return_lse: bool,
) -> Any:  # fmt: skip
    """Run the op. query [B, S_q, H, D], key and value [B, S_kv, H_kv, D] -> [B, S_q, H, D], and lse [B, S_q, H]."""
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
    """Of a layer's latest call: the keys base, selector, action, share of the blocks and block_map of its row.

    Waits for the device where blocks are kept.
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
    """What a row's note says of it: "5.2 % of its blocks promoted to 16 bit, the others in nvfp4 (block_mean)"."""
    share = "blocks" if facts["share"] is None else f"{100 * facts['share']:.1f} % of its blocks"
    return f"{share} {DONE[facts['action']]}, the others in {facts['base']} ({facts['selector']})"
