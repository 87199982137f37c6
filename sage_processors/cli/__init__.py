"""The command line, one file a command: sage-processors demo | report | doctor | calibrate | bench.

May import everything; nothing imports it.
"""
