"""What the ranks of this host are in, for `pydist doctor` and for dumps."""
