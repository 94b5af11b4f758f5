"""Settings of Sphinx.

  uv run --group docs sphinx-build -W -b html docs docs/_build

With -W a warning is an error: of a reference, a docstring, a public name.
"""

import importlib.metadata
import os
import pathlib
import sys

DOCS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / '_ext')]
# The build needs no GPU, and leaves one to those who do.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

project = 'rnnzoo'
author = 'The rnnzoo authors'
copyright = author
release = importlib.metadata.version('rnnzoo')
version = release

extensions = [
    'myst_parser',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx_copybutton',
    'docstrings',
    'public_names',
]
exclude_patterns = ['_build', '_ext', 'drawings']
source_suffix = {'.md': 'markdown', '.rst': 'restructuredtext'}

# Quotes and dots are code: h', [...].
smartquotes = False

html_theme = 'furo'
html_title = f'rnnzoo {release}'
html_static_path = ['_static']
html_css_files = ['custom.css']
html_theme_options = {'navigation_with_keys': True}

myst_enable_extensions = ['colon_fence', 'deflist']
myst_heading_anchors = 3

autoclass_content = 'both'
autodoc_inherit_docstrings = False
autodoc_member_order = 'bysource'
autodoc_typehints = 'none'
autodoc_preserve_defaults = True
autodoc_class_signature = 'mixed'
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ['References']

nitpicky = True
# Other libraries, whose pages the build does not ask for, and private classes.
nitpick_ignore_regex = [
    (
        r'py:.*',
        r'(abc|absl|builtins|collections|flax|jax|linen|ml_collections|nnx|np'
        r'|numpy|optax|orbax|os|pathlib|types|typing)(\..*)?',
    ),
    (r'py:.*', r'rnnzoo\.training\.(placement|step)\..*'),
    (r'py:.*', r'rnnzoo\.(inspect\.planning\.Message|engines\.choice\.Choice)'),
]

copybutton_prompt_text = r'>>> |\.\.\. |\$ '
copybutton_prompt_is_regexp = True
