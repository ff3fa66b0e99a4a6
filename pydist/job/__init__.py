"""Who is in the job: launchers, meeting, backends, groups, joining and leaving."""
