"""Compute kernels, one file each, in plain torch; what depends on the device is decided here and nowhere else."""
