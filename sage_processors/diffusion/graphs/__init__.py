"""CUDA graphs of a whole forward, and the checks that the model is still what was captured.

May import host/.
"""
