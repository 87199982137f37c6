"""All Triton and Gluon code and its launchers: the only folder that imports triton, loaded when a kernel is.

Its files may import the ground floor of sage_kernels, never `reference`; its rooms: launch ← prologue ← attention,
and decode beside these.
"""
