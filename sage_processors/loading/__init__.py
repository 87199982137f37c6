"""`SageConfig`: diffusers and transformers load weights of linear layers straight into 8 bit.

May import linears/ and what is below it. Nothing imports this room but the package itself.
"""
