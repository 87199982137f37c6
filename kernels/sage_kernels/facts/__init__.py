"""Recipes, rounding, masks and the layout of state: what ops, reference and kernels agree on.

May import torch, and nothing else of this package.
"""
