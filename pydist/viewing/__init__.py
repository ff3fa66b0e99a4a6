"""A page over the runs that `pydist.monitor` has written: `pydist view`."""
