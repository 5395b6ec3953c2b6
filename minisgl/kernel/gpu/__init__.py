"""Triton kernels, one file per operation; each has its plain-torch twin in `kernel.reference` or `kernel.sampling`.

Imported only where a CUDA device is used (and by tests, in Triton's interpreter). They know tensors only.
"""
