"""Handle of a transformers model, the cache that its `generate` makes, and graphs of decode steps.

May import the rest of language/, linears/, and of diffusion/ only graphs/.
"""
