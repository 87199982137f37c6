"""What ran, how far it is from 16-bit attention, files of scales, and kernels compiled ahead.

May import host/, heads/ and calls/.
"""
