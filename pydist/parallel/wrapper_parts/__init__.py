"""The parts of `pydist.DataParallel`: its base classes, and what these alone need."""
