"""Event counters of layers, and the rows, totals and tables that all reports share.

May import files/ and sage_kernels.
"""
