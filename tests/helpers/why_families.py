"""How far the contributions to a logit of a tiny model are from the logit."""

from attnscope.study.why.parts import parts_of
from attnscope.study.why.records import AskedLogit
from helpers.parity_models import as_loaded

QUERY = 15
LAYERS = 4  # of a stack; keys may be an earlier layer's


def last_of(model, ids, query=QUERY, stack=None, sides=("key", "query"), **inputs):
    """The last layer of a stack, by both sides; its largest error as a share of the sum of |terms|."""
    loaded = as_loaded(model)
    layers = loaded.geometry.heads_of_stacks[stack or loaded.geometry.stack]
    layer, heads = [(layer, heads) for layer, heads in layers.items() if heads][-1]
    errors = []
    for side in sides:
        found = parts_of(loaded, ids, AskedLogit(layer, heads - 1, query, side=side, stack=stack), **inputs)
        assert len(found.components) > min(layer, LAYERS)  # a row for what each earlier block writes
        errors.append(abs(found.sum - found.logit) / abs(found.contribution_N).sum())
    return max(errors)
