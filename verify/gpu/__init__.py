"""GPUs: devices, autotune configurations, which kernels are compiled already, and the record of the GPU gate."""
