"""Q and K before attention in 16 bit: norm of each head, rotary embedding, joining of text and image.

May import `sage_kernels.facts`, `_triton`'s own files and `launch`; nothing of attention.
"""
