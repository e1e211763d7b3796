"""Sphinx configuration: MyST Markdown and the Furo theme."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = (ROOT / "hfseq" / "plugins" / "registry.py").read_text(encoding="utf-8")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "hfseq"
author = "the hfseq authors"
copyright = "the hfseq authors, Apache 2.0"
release = re.search(r'__version__ = "(.+)"', SOURCE).group(1)

sys.path[:0] = [str(ROOT), str(ROOT / "plugins")]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
smartquotes = False  # keep -- in flags
exclude_patterns = ["_build", "examples"]

# Notebooks are shown with the outputs that are stored in them (scripts/run_notebooks.py).
nb_execution_mode = "off"
nb_merge_streams = True

napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Docstrings use single backticks for code; types of signatures name private and foreign modules.
default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
nitpick_ignore_regex = [("py:.*", ".*")]
linkcheck_anchors = False

html_theme = "furo"
html_title = f"hfseq {release}"
html_static_path = ["_static"]
html_logo = "_static/logo.svg"
html_theme_options = {
    # The links "edit this page" and "view source".
    "source_repository": PROJECT["urls"]["Repository"],
    "source_branch": "main",
    "source_directory": "docs/",
}
html_css_files = ["hfseq.css"]
html_js_files = [("filter.js", {"defer": "defer"})]
html_copy_source = False
html_show_sphinx = False
