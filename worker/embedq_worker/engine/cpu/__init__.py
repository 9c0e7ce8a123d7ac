"""Compiled bfloat16 kernels for CPUs with AVX-512 and AMX."""
