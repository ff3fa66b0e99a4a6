"""The state of a sharded optimizer: each rank's part, its forms, and what programs see of it."""
