"""8-bit linear layers: which are swapped, their weights, and activations handed on as codes.

May import sage_kernels and the files of sage_processors that belong to no room; nothing of diffusion or language.
"""
