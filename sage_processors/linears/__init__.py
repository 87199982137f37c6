"""8-bit linear layers: choosing and swapping them, their weights, balances, reports and files.

May import sage_kernels, sage_processors/postponed/ and the files of sage_processors that belong to no room; nothing of
diffusion or language.
"""
