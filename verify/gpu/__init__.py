"""GPUs: devices, configurations of autotuned kernels, what is compiled already, and the record of the GPU gate."""
