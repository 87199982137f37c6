"""Measure a checkpoint of one's own: how fast it is, and how near to stock.

May import what the folder above may import.
"""
