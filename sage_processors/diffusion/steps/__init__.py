"""Follow denoising runs: the running step of a scheduler, its noise level, and the steps in 16 bit.

May import host/, reporting/ and options; nothing else of diffusion/.
"""
