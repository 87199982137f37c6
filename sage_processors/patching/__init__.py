"""Replace functions inside other functions, detect replacements by others, and walk nested arguments.

May import nothing else of this package.
"""
