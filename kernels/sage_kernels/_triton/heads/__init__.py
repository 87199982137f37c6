"""Q and K made ready for attention in 16 bit: norm of each head, rotary embedding, text and image side by side.

May import the ground floor, `_triton`'s own files and `launch`; nothing of attention.
"""
