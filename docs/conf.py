"""How Sphinx makes the documents a site: `make docs`.

Its sources are the repository itself, so that links between files work on a code host too: Markdown
files are pages, any other linked file is copied. docs/generate.py writes the reference pages.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

import largebatch  # noqa: E402 -- this checkout's, found by the line above

project = "largebatch"
version = release = largebatch.__version__
copyright = ""  # noqa: A001 -- Sphinx's name for it

extensions = ["myst_nb", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "docs/**.ipynb", "*.md", "benchmarks/README.md"]
exclude_patterns = [".venv*", "build", ".git", "*.egg-info", "shared", "recipes", "largebatch"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
smartquotes = False  # options begin with two hyphens
myst_ref_domains = ["std"]
nb_execution_mode = "off"  # a test executes notebooks

html_theme = "furo"
html_title = "largebatch"
html_additional_pages = {"index": "index.html"}
html_static_path = ["static"]
html_css_files = ["widths.css"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False
templates_path = ["templates"]


def setup(app: Sphinx) -> None:
    """Keep the hundreds of keys and functions of the reference out of the lists of headings."""
    app.connect("doctree-read", _shorten_contents)


def _shorten_contents(app: Sphinx, _: object) -> None:
    if app.env.docname.startswith("docs/reference/"):
        app.env.metadata[app.env.docname]["tocdepth"] = 2
