"""8-bit linear layers in the graphs that torch.compile makes: fused calls in place of single ones.

May import postponed/ of the package and sage_kernels; nothing else of this folder.
"""
