"""CUDA graphs of forwards and blocks, and the checks that a replay is what an eager call would be.

May import host/, linears/, patching/, postponed/ and reporting/; nothing else of diffusion/.
"""
