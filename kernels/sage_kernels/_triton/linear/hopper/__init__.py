"""The 8-bit matmul for Hopper (sm_90) in Gluon: one warp copies, two warpgroups multiply and finish.

May import what `linear` may, and linear's epilogue.py and matmul.py. Imported only when such a kernel is launched.
"""
