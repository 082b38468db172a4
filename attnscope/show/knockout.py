"""A knockout drawn."""


def save_knockout(found, folder, style=None):
    return None
