"""8-bit weights of linear layers: which layers have one, where it is stored, when it is made again.

May import sage_processors/postponed/ and sage_kernels; nothing else of linears/.
"""
