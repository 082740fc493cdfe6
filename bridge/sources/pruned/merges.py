"""Find the tokens that BPE makes on the way to one token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

Ranks = Mapping[tuple[str, str], int]


def parts_of(token: str, ranks: Ranks) -> set[str]:
    """Return all tokens that merging `token`'s characters passes through, itself included.

    In a text, no merge crosses the border of a token that comes out of it. So these are the tokens that stood in its
    place, whatever stood beside it. {token} if merges do not make it: then no text holds it, or it is found whole.

    >>> sorted(parts_of("abc", {("b", "c"): 0, ("a", "b"): 1, ("a", "bc"): 2}))
    ['a', 'abc', 'b', 'bc', 'c']
    """
    pieces = list(token)
    passed = set(pieces)
    while len(pieces) > 1:
        pairs = itertools.pairwise(pieces)
        rank, at = min((ranks.get(pair, len(ranks)), at) for at, pair in enumerate(pairs))
        if rank == len(ranks):
            return {token}
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        passed.add(pieces[at])
    return passed
