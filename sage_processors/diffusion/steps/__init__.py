"""Follows a run: which step of which scheduler, at which noise level, and which steps stay in 16 bit.

May import host/.
"""
