"""One process that computes on several devices: a copy of the module on each."""
