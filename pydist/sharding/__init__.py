"""The optimizer whose state the ranks share out."""
