"""pydist under training frameworks: one module for each, which alone imports that framework."""
