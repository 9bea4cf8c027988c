"""Cached and evicted contents of a trace, derived from the block ids in its lines alone."""

from collections import Counter

import attrs
from helpers import traces


def blocks_of(runs):
    """Yield the blocks of runs `[first, count]`; a negative count runs downwards."""
    for first, count in runs:
        way = 1 if count > 0 else -1
        yield from range(first, first + count, way)


@attrs.frozen
class Eviction:
    """An EVICT line of scope `cache`: its number, the evicted contents, and the line itself."""

    row: int
    contents: list
    line: dict


class TraceBlocks:
    """The contents of blocks in a trace, each a pair of a key and the block's place in the key.

    Attributes:
        lines: lines of the trace.
        evictions: evictions in their order.
        admissions: number of the first HIT or MISS line of each request, in their order.
        lookup, hit: number of blocks that each request looked up and hit at its admission.
    """

    def __init__(self, path):
        """Read the trace at `path`."""
        self.lines = traces.lines(path)
        header = self.lines[0]
        self.size = header["block_size"]
        self.ratio = header["key_tokens"] // self.size
        self.whole = header["count"] == "keys"
        self.keys, self.lookup, self.hit, self.admissions = {}, {}, {}, {}
        self._users = {}  # by the number of requests that are still to come
        self.evictions = []
        for _ in self.cached(self.evictions.append):
            pass

    def prompt(self, request):
        """Return the contents of a prompt, by position."""
        return [(key, part) for key in self.keys[request] for part in range(self.ratio)]

    def cached(self, evicted=id):
        """Yield the cached contents after each line; `evicted` is called for each eviction."""
        owner, table, content = {}, {}, {}
        for index, line in enumerate(self.lines):
            kind = line["event"]
            if kind == "REQUEST":
                self.keys[line["id"]] = line["keys"]
                blocks = len(line["keys"]) * self.ratio
                # The last token is always computed, except in the accounting of keys.
                last = blocks if self.whole else (line["prompt"] - 1) // self.size
                self.lookup[line["id"]] = min(last, blocks)
            elif kind in ("HIT", "MISS"):
                owner[line["seq"]] = line["request"]
                if not line.get("again"):
                    self.admissions.setdefault(line["request"], index)
                    self.hit.setdefault(line["request"], line.get("blocks", 0))
            elif kind == "ALLOC":
                places = table.setdefault(line["seq"], {})
                places |= enumerate(blocks_of(line["runs"]), line["first"])
            elif kind == "COMMIT" and line["how"] in ("new", "grown"):
                prompt = self.prompt(owner[line["seq"]])
                for place in range(line["first"], line["first"] + line["blocks"]):
                    content[table[line["seq"]][place]] = prompt[place]
            elif kind == "EVICT" and line["scope"] == "cache":
                gone = [content.pop(block) for block in blocks_of(line["runs"])]
                evicted(Eviction(index, gone, line))
            yield content.values()

    def users(self, row):
        """Return, by content, the next request after a row that looks it up, and where."""
        later = [request for request, admitted in self.admissions.items() if admitted > row]
        if len(later) not in self._users:
            users = self._users[len(later)] = {}
            for request in later:
                prompt = self.prompt(request)
                for index in range(self.lookup[request]):
                    users.setdefault(prompt[index], (request, index))
        return self._users[len(later)]


def differing(left, right):
    """Return by row of `left` the number of blocks that `right` did not evict there.

    An eviction of `right` counts if it is of the same content, for the same request.
    """
    theirs = Counter(
        (eviction.line["for"], content)
        for eviction in right.evictions
        for content in eviction.contents
    )
    marks = Counter()
    for eviction in left.evictions:
        for content in eviction.contents:
            loss = eviction.line["for"], content
            if theirs[loss]:
                theirs[loss] -= 1
            else:
                marks[eviction.row] += 1
    return marks
