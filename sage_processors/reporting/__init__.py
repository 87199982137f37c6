"""Counts of what layers ran, and the rows and totals that every report shares.

May import files/ and sage_kernels.
"""
