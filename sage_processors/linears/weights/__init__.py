"""8-bit copies of weights: which layers have one, where it is stored, whether the 16-bit weight changed.

May import compiled/ and sage_kernels.
"""
