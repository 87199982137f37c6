"""Attention in two precisions: codes of K and what selectors ask of it, the choice of blocks, the attention kernel.

May import ground floor, `compat`, `launch`, primitives, and the jitted functions of `prologue` and `attention`.
"""
