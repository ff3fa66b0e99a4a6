"""How `make docs` makes a site: the Markdown pages of the repository, and the reference in api/.

Its root is the repository's, so that links between pages work here as they do there.
"""

import pydist

project = "pydist"
author = "The pydist authors"
copyright = author
version = release = pydist.__version__

root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/**", "tests/drop_in/README.md"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"description": "Data-parallel training for PyTorch", "page_width": "72rem"}
html_copy_source = False

# Headings that other pages link to.
myst_heading_anchors = 3

# Docstrings write code in single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
