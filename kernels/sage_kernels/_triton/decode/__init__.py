"""Kernels of the INT8 KV cache: append tokens, and attention of a few queries over it.

May import `launch`, `_triton`'s own files and `sage_kernels.facts`; not attention or its prologue.
"""
