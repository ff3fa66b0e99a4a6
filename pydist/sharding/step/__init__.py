"""The step of a rank's shard: by which kernels or classes, and how all ranks take it or none."""
