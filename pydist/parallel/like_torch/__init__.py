"""What is there for programs that were written for torch's DistributedDataParallel."""
