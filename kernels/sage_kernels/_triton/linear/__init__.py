"""8-bit linear layers in Triton: rows quantised, matmuls with their epilogues.

May import the ground floor, `_triton`'s own files and `launch`; nothing of attention.
"""
