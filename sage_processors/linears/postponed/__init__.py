"""Postponed results of norms and linear layers, and the 8-bit codes of activations.

May import weights/, sage_processors/postponed/ and sage_kernels.
"""
