"""How much memory training takes, and how long a step on many hosts."""
