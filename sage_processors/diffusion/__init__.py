"""INT8 attention for diffusers: swap it into denoisers, follow their steps, report the calls.

May import sage_kernels, linears/, postponed/, patching/, reporting/, files/ and the files beside this folder. Imports
diffusers only when it is used.
"""
