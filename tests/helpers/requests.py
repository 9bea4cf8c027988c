"""The one way to make a request of keys: they fill its prompt, with a few tokens more."""

from kvcore import Request


def prefixes(text, key=str):
    """Return the chained keys of a text, a letter a block: its prefixes."""
    return [key(text[: end + 1]) for end in range(len(text))]


def keyed(name, keys, key_tokens=4, *, more=0, **fields):
    """Return a request whose keys fill its prompt, except its last `more` tokens."""
    tokens = key_tokens * len(keys) + more
    return Request(id=name, prompt_tokens=tokens, keys=keys, key_tokens=key_tokens, **fields)
