"""Read JSON files strictly, write files in one step, and hash a model's configuration.

May import nothing else of this package.
"""
