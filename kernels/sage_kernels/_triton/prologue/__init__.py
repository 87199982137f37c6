"""Kernels of the prologue before attention, and the kernel that plans the next denoising step.

Before attention: lists of key tiles from a mask, rotation of Q and K, quantisation of K and V.

May import `launch`, `_triton`'s own files and `sage_kernels.facts`; not attention, which reads their results.
"""
