"""Files read strictly and written whole, and the hash of a model's configuration that they hold.

May import nothing else of this package.
"""
