"""The attention kernels, their tile table and their launch; hopper/ has the kernel for sm_90.

May import `prologue`, `launch`, the files of `_triton` itself and `facts`; not `decode`.
"""
