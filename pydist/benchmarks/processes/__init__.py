"""The processes that carry a benchmark: started by it, by an MPI, or found under a launcher."""
