"""Compute kernels: on a CUDA tensor Triton, elsewhere plain torch. Importable without triton and without torch."""
