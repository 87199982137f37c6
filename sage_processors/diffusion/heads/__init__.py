"""Norms of heads and the rotary embedding in one pass over queries and keys.

May import postponed/ and sage_kernels; nothing else of this folder.
"""
