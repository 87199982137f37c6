"""Attention calls of diffusers models: INT8 attention, or 16 bit with a counted reason.

May import host/, steps/ and heads/.
"""
