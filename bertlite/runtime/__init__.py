"""Packed models without torch: numpy, tokenizers, ctypes and the compiled kernels.  It imports no other room."""
