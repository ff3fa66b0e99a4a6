"""For programs that test what they do when something goes wrong."""
