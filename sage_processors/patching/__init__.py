"""Replacing what functions call, noticing what others replaced, and walking a model's arguments.

May import nothing else of this package.
"""
