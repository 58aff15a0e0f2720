"""A laboratory for on-policy self-distillation of language models."""

__version__ = "0.1.0"
