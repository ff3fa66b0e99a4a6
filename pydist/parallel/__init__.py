"""The wrapper that averages gradients, and all that it needs."""
