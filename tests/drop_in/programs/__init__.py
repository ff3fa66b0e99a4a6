"""Programs as people write them for torch's DDP, by theme."""
