"""The protocol for a checkpoint of one's own: how fast it is, and how near to stock. For `time` and `rate`.

May import what the folder above may import.
"""
