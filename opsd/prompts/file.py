"""A template out of a file of the user's own. The launcher reads it; its texts then stand in the config like any other's."""

from __future__ import annotations

from opsd.prompts.template import Template
from opsd.registry import register


@register("prompt", "file")
class TemplateFile(Template):
    path: str  # where the texts came from
