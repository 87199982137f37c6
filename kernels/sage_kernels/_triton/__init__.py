"""All Triton and Gluon kernels with their launchers: the only folder that imports triton.

It is imported when the first kernel is needed. Its files may import `sage_kernels.facts`, never `reference`. Its rooms
import one way: mixed → attention → prologue → launch; decode, heads and linear → launch.
"""
