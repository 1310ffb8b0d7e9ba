"""Kernels in C++ behind a plain C interface, loaded by ctypes: no PyTorch ABI, and none of them is needed for the numbers to be right."""
