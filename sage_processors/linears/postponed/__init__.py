"""Results of norms and linear layers that wait for the layer that uses them, and rows as 8-bit codes.

May import weights/.
"""
