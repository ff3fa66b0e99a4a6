"""Evaluation that gives all ranks the result of one process."""
