"""INT8 attention and an INT8 KV cache for transformers models.

May import options and the files beside it, linears, sage_kernels and transformers.
"""
