"""For the site: a docstring's `Source:` is a paragraph, where griffe would make a box with its first line as title."""

import re

from griffe import Extension

_SOURCE = re.compile(r"^Source: (.*(?:\n +\S.*)*)", re.MULTILINE)


class Sources(Extension):
    """Rewrites docstrings before they are parsed."""

    def on_object(self, *, obj, **kwargs):
        """Mark the word and take the lines of the source to the left."""
        if obj.docstring is not None:
            obj.docstring.value = _SOURCE.sub(
                lambda found: "*Source:* " + re.sub(r"\n +", "\n", found[1]), obj.docstring.value
            )
