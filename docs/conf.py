"""Sphinx configuration: MyST Markdown and the Furo theme."""

import re
from pathlib import Path

SOURCE = (Path(__file__).parent.parent / "hfseq" / "__init__.py").read_text(encoding="utf-8")

project = "hfseq"
author = "the hfseq authors"
copyright = "the hfseq authors, Apache 2.0"
release = re.search(r'__version__ = "(.+)"', SOURCE).group(1)

extensions = ["myst_parser"]
myst_heading_anchors = 3
smartquotes = False  # would make a dash of --
exclude_patterns = ["_build", "examples"]

html_theme = "furo"
html_title = f"hfseq {release}"
html_static_path = ["_static"]
html_css_files = ["hfseq.css"]
html_copy_source = False
html_show_sphinx = False
