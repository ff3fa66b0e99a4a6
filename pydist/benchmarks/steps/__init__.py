"""Benchmarks of training steps: models, what is compared, and what came out."""
