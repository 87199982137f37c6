"""The command line, one file a command: sage-processors demo | report | doctor | warm-up | calibrate | bench.

May import everything; nothing imports it.
"""
