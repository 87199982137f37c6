"""Kernels of 8-bit linear layers: quantise rows, multiply, and finish the output in the same kernel.

May import `sage_kernels.facts`, `_triton`'s own files and `launch`; nothing of attention.
"""
