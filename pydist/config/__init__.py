"""One object that says how training is set up: `pydist.Config`, and what of it is in force."""
