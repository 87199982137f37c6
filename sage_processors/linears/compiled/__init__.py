"""8-bit linear layers in the graphs that torch.compile makes: fused calls in place of single ones.

May import sage_processors/postponed/ and sage_kernels; nothing else of linears/.
"""
