"""What swaps INT8 attention and an INT8 KV cache into transformers models.

May import options and the files beside it, sage_kernels, transformers.
"""
