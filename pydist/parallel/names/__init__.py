"""Names of the module within a wrapper, and the states that have them."""
