"""Compiled bfloat16 kernels for CPUs with AVX512_BF16, and AMX where it exists."""
