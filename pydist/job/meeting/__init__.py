"""How the ranks of a job find each other, and what they agree on before anything is built."""
