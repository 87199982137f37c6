"""From the statistics of a step to the scales of the next: the state of attention's call sites and its rules.

May import the ops and their checks; knows nothing of Hugging Face. Nothing below imports it.
"""
