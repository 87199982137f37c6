"""From a quality budget to the fastest options that meet it, kept as a policy file.

May import evaluation, diffusion and what those may: linears.
"""
