"""Results that wait for their consumer, so that one kernel computes both: when they may, and the tensors that do.

Imports torch, sage_kernels' compat and patched.py, which watches functions, and nothing else of this package.
"""
