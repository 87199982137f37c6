"""Planning: from the statistics of a denoising step to the plan of the next.

May import the ops and facts; knows nothing of Hugging Face. No other room of sage_kernels imports it.
"""
