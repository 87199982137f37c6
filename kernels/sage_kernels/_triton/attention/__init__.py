"""The attention kernel, its tile table and how a call is launched; for Hopper a kernel of its own (hopper/).

May import `prologue`, `launch`, `_triton`'s own files and the ground floor; not decode.
"""
