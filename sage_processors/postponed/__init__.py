"""Results that wait for their consumer, so that one kernel computes both.

May import sage_kernels and the files of sage_processors itself (patched.py), no other room.
"""
