"""Where the ranks of a job are, and what is between them: hosts, processors, interfaces, links."""
