"""Going on with the ranks that are left: who they are, their new job, and whom they left behind."""
