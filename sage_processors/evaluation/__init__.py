"""How far pictures, clips, text and attention's own output are from stock: metrics, inputs made hard, tables, figures.

May import diffusion, language and what those may; nothing of calibration.
"""
