"""Norms of query and key heads and the rotary embedding, computed in one pass.

May import postponed/ and sage_kernels; nothing else of this folder.
"""
