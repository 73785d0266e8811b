"""How Sphinx makes a site of these pages: `make docs`."""

import importlib.metadata
import re

from docutils import nodes
from latex2mathml.converter import convert

project = "lightning-hetero"
author = "The lightning-hetero developers"
copyright = author
release = importlib.metadata.version(project)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"{project} {release}"
html_math_renderer = "mathml"  # see below

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # links to headings, named as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _formula(display):
    def write(writer, node):
        formula = convert(node.astext(), display=display)
        writer.body.append(f'<div class="formula">{formula}</div>' if display == "block" else formula)
        raise nodes.SkipNode

    return write, None


def _without_links_to_folders(app, page, source):
    # On GitHub links lead to folders, and to texts outside of docs/, too; here these have no page.
    outside = r"\.\./" * (1 + page.count("/"))
    source[0] = re.sub(rf"\[([^\]]+)\]\({outside}(?:[\w-]+/)*(?:[\w-]*|[\w-]+\.md(?:#[\w-]+)?)\)", r"\1", source[0])


def _break_names_in_tables(app, doctree, page):
    # Long names may break after these characters, and before "Strategy", so that tables fit on a phone.
    for literal in [node for entry in doctree.findall(nodes.entry) for node in entry.findall(nodes.literal)]:
        parts = re.split(r"(?<=[_./=(,:])(?=\w)|(?=Strategy)", literal.astext())
        literal.clear()
        for i, part in enumerate(parts):
            literal += ([nodes.raw("", "<wbr>", format="html")] if i else []) + [nodes.Text(part)]


def setup(app):
    """Called by Sphinx."""
    # Browsers draw MathML by themselves, so that the site needs no network.
    app.add_html_math_renderer("mathml", _formula("inline"), _formula("block"))
    app.connect("source-read", _without_links_to_folders)
    app.connect("doctree-resolved", _break_names_in_tables)
