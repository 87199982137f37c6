"""The attention kernel of sm_90 in Gluon: one warpgroup of copies, and others that compute on what it brings.

May import what `attention` may, and its tiles and key lists; imported only where such a kernel is launched.
"""
