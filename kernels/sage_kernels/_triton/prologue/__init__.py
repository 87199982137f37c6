"""What runs before the attention kernel (mask lists, rotation, codes of K and V), and what plans the next step.

May import `launch`, `_triton`'s own files and the ground floor; not attention, whose kernels read what is made here.
"""
