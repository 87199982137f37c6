"""Mixed attention: most key blocks in a cheap format, a few chosen ones in 16 bit or left out.

May import `facts`, `compat`, `launch`, primitives, and the jitted functions of `prologue` and `attention`.
"""
