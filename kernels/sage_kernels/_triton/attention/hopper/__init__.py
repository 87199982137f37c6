"""The attention kernel for sm_90 in Gluon: a producer warp copies, consumer warpgroups compute.

May import what `attention` may, and its tile table and operands; imported only to launch such a kernel.
"""
