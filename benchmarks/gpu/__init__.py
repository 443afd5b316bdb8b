"""What kernels and swaps do on a GPU: one run of under ten minutes that needs PyTorch and Triton alone.

`session` holds the device, its clock and the report; every other module is a phase of the run.
"""
