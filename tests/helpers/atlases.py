"""An atlas that says what a test wants it to say."""

import numpy as np

from attnscope.model.checkpoint import weights_sha256
from attnscope.observe.atlas import SCHEMA
from attnscope.studies.atlas import Atlas, Finding
from attnscope.studies.statistics import Effects


def made_atlas(folder, roles, model="demo", revision=None, heads=(4, 6)):
    """The atlas of a model's folder (None: of no known weights), all effects 0; roles: {(layer, head): names}."""
    places = tuple(np.ndindex(*heads))
    zeros = np.zeros(len(places))
    effects = Effects(*[zeros] * 10, n=np.full(len(places), 64))
    said = {"name": model, "revision": revision, "type": "llama", "weights_sha256": weights_sha256(folder)}
    facts = {"schema": SCHEMA, "model": said, "seed": 0, "sequences": 64, "ids_sha256": "0" * 64}
    named = {place: tuple(roles.get(place, ())) for place in places}
    return Atlas(named, facts, [Finding("sink", "uniform", effects)])
