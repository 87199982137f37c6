"""Postponed results: the layer that uses one computes it together with its own, in one kernel.

A norm or a linear layer returns a tensor without numbers (tensor.py). This is safe only inside of a repeated block
of the model (block.py, region.py) in which all code is a library's (enclosure.py, library.py).
May import sage_kernels and the files of sage_processors itself (patching/), no other room.
"""
