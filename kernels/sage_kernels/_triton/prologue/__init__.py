"""Kernels before attention: mask lists, rotation, codes of K and V; and the kernel that plans the next step.

May import `launch`, `_triton`'s own files and `sage_kernels.facts`; not attention, which reads their results.
"""
