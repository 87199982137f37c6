"""The public ops: they check their inputs, then launch kernels, or run the reference on a CPU.

May import checks, facts, reference and, where a GPU is there, _triton.
"""
