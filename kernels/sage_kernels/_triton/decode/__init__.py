"""Kernels of the INT8 KV cache: append tokens, and attention of a few queries over it with the keys split.

May import `launch`, `_triton`'s own files and the ground floor; not attention or its prologue.
"""
