"""The GPUs of this host and NCCL's library: what is there, what is free, what to take."""
