"""CUDA graphs of whole forwards, and the check that a model is unchanged since the capture.

May import host/, linears/, patching/ and postponed/; nothing else of diffusion/.
"""
