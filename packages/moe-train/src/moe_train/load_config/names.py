"""The names most like one that does not exist."""

import difflib
from collections.abc import Iterable, Mapping


def nearest(key: str, known: Iterable[str], dashes: str = "") -> str:
    """Name the known keys most like ``key``: by spelling, or with the same last part."""
    known = list(dict.fromkeys(known))
    last = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == last or k.startswith(f"{key}.")]
    near += _most_like(key, {k: k for k in known}, cutoff=0.7)
    near = near or _most_like(last, {k.rpartition(".")[2]: k for k in known}, cutoff=0.6)
    names = ", ".join(dashes + name for name in list(dict.fromkeys(near))[:3])
    return f"; nearest: {names}" if names else f"; there are: {', '.join(sorted(known)[:8])}, ..."


def _most_like(word: str, known: Mapping[str, str], cutoff: float) -> list[str]:
    likeness = {k: difflib.SequenceMatcher(None, word, k).ratio() for k in known}
    best = max(likeness.values())
    near = [k for k in known if likeness[k] >= max(cutoff, best - 0.05)]
    # A mistyped end is the likelier slip, so among equals the beginning leads.
    near.sort(key=lambda k: (likeness[k], word.startswith(k)), reverse=True)
    return [known[k] for k in near]
