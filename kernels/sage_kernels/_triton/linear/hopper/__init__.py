"""The 8-bit matmul of sm_90 in Gluon: one warp copies, two warpgroups multiply and finish.

May import what `linear` may, and its epilogue and order of tiles; imported only where such a kernel is launched.
"""
