"""Code for diffusers' internals: find and rebind attention processors, add a back end.

May import patching/ and postponed/; nothing else of diffusion/.
"""
