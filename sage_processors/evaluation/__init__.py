"""Compare pictures, clips, text and attention output with stock: metrics, hard inputs, reports.

May import diffusion, language and what those may import, but nothing of calibration.
"""
