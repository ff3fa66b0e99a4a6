"""Micro-benchmarks: what `pydist bench` runs."""
