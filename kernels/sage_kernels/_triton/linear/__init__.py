"""8-bit linear layers in Triton: rows quantised, matmuls with their epilogues. Imports Triton, the parts that kernels
share and the number formats; nothing of attention."""
