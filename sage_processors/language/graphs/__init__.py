"""CUDA graphs of the decode step of transformers models, over static buffers that caches borrow.

May import the rest of language/, and of diffusion/ only the capture and the check of a model's state in graphs/.
"""
