"""What a layer's attention call runs: INT8 attention, or 16 bit with the reason counted.

May import host/, steps/ and heads/.
"""
