"""Search for the fastest options within a quality budget, and the policy files that keep them.

May import evaluation, diffusion and what those may import, such as linears.
"""
