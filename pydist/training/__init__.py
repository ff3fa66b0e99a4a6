"""Everything that training needs, made of one configuration: `pydist.initialize`."""
