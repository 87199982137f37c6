"""CUDA graphs of forwards and of blocks, and comparisons of replays with eager calls.

May import host/, linears/, patching/, postponed/ and reporting/; nothing else of diffusion/.
"""
