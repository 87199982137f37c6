"""Command line of sage-processors: demo, report, doctor, warm-up, calibrate and bench.

May import everything. Nothing else in the package imports it.
"""
