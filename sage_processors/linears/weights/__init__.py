"""8-bit weights of linear layers: choosing the layers, storing weights, noticing changes.

May import sage_processors/postponed/ and sage_kernels; nothing else of linears/.
"""
