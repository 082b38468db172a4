"""Prompts in, observations out: one forward pass, the path that single texts and corpora share."""

from attnscope.observe.passes import model_facts, observe
from attnscope.observe.request import Asked, Request

__all__ = ["Asked", "Request", "model_facts", "observe"]
