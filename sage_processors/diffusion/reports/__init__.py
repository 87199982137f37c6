"""Reports of past calls, errors against 16-bit attention, scale files, and warm-up of kernels.

May import host/, heads/ and calls/.
"""
