"""Finding a denoiser's attention processors and giving them other classes; all private names of diffusers.

May import patching/ and options; nothing else of this folder.
"""
