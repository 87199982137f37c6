"""Text from a transformers model as a whole: its handle, the cache that `generate` makes, and graphs of decode steps.

May import the rest of language/, linears/, and of diffusion/ only graphs/.
"""
