"""Recipes, rounding, masks and state layout: all that ops, reference and kernels agree on.

May import torch, and nothing else of this package but, lazily, the version checks of _triton/compat.
"""
