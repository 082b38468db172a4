"""Prompts in, observations out: one forward pass, the path that single texts and corpora share."""

from attnscope.keep.request import Asked, Request
from attnscope.observe.passes import model_facts, observe

__all__ = ["Asked", "Request", "model_facts", "observe"]
