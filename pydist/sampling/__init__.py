"""Which samples a rank gets, in which order, and how that is resumed."""
