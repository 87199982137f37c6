"""The code that touches diffusers: find and rebind attention processors, register a back end.

May import patching/ and postponed/; nothing else of diffusion/.
"""
