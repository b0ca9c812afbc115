"""Sphinx: the pages of this folder and the reference made from the docstrings."""

from accumplug import __version__

project = "accumplug"
release = __version__
copyright = "the accumplug authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"

html_theme = "furo"
html_title = f"accumplug {release}"
html_show_sphinx = False

myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
