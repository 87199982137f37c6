"""What swaps INT8 attention into diffusers' denoisers, follows their steps and reports what ran.

May import options and the files beside it, sage_kernels; diffusers only where it is there.
"""
