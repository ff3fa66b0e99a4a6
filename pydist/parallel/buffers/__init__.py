"""How all ranks get rank 0's buffers, and what warns where they have computed with others."""
