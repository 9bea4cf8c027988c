// Contents of blocks: the blocks that are equal, the next request for each, and the optimum's share.
//
// A prompt shares its first blocks with its leader and has the rest for itself, so each content
// has one name: the request that first had it, and the position there.
//
//   leader  0 ─────────┬──────────── 9        content of request 7 at 2: (leader, 2)
//   request 7          └───────── 8           content of request 7 at 6: (7, 6)
//                      ▲ shared = 4

/** Return the first of the indices from 0 to `length` for which `holds` is true, as it is from there on. O(log). */
function firstIndex(length, holds) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Return how many of some ascending values are not above `limit`. O(log). */
function countUpTo(values, limit) {
  return firstIndex(values.length, (at) => values[at] > limit);
}

/**
 * What is there of each content, by cache group and owner, from pieces `[group, owner, first, end]`. Those of a group may begin
 * amid a prompt, and be there twice.
 */
class Stretches {
  constructor(pieces) {
    this.of = new Map(); // ascending and apart
    for (const [group, owner, first, end] of pieces) {
      const key = `${group} ${owner}`;
      if (!this.of.has(key)) this.of.set(key, []);
      this.of.get(key).push([first, end]);
    }
    for (const [key, found] of this.of) {
      const apart = [];
      for (const [first, end] of found.sort((one, other) => one[0] - other[0])) {
        const last = apart.at(-1);
        if (last?.[1] >= first) last[1] = Math.max(last[1], end);
        else apart.push([first, end]);
      }
      this.of.set(key, apart);
    }
  }

  /** Yield the parts of a piece that are there. */
  *parts([group, owner, first, end]) {
    const found = this.of.get(`${group} ${owner}`) ?? [];
    for (let at = firstIndex(found.length, (each) => found[each][1] > first); at < found.length && found[at][0] < end; at++) {
      yield [Math.max(first, found[at][0]), Math.min(end, found[at][1])];
    }
  }
}

/** The contents of the prompts of a trace. */
class Contents {
  constructor(playback) {
    this.playback = playback;
    this.requests = playback.requests;
    this._admissions(playback);
    this._uses();
  }

  /** Return the request that first had the block at `position` of a prompt. O(its leaders). */
  owner(request, position) {
    const { leader, shared } = this.requests;
    let at = request;
    while (position < shared[at]) at = leader[at];
    return at;
  }

  /** Return a piece of a prompt as pieces `[owner, first, end)`, in order. */
  pieces(request, first, end) {
    return contentPieces(this.requests, request, first, end);
  }

  /** Record the row of each first admission (before the window: negative), and the sums of their lookups and hits. */
  _admissions(playback) {
    const { admitted, lookup, hit } = this.requests;
    this.admitted = admitted.map((line) => line - playback.about.first);
    this.rank = new Int32Array(admitted.length).fill(-1); // place in `order`
    this.order = [...admitted.keys()].filter((request) => admitted[request] >= 0);
    this.order.sort((a, b) => admitted[a] - admitted[b]);
    this.totals = { hits: 0, lookups: 0 };
    this.order.forEach((request, place) => {
      this.rank[request] = place;
      this.totals.lookups += lookup[request];
      this.totals.hits += hit[request];
    });
  }

  /** Return the place among admissions of the first one after `row`: an EVICT stands before the one it makes room for. */
  rankAt(row) {
    return firstIndex(this.order.length, (each) => this.admitted[this.order[each]] > row);
  }

  /** Divide each request's own blocks where others part, and list the requests that use each part. */
  _uses() {
    const { leader, shared, lookup, blocks } = this.requests;
    const ends = Array.from(leader, () => new Set());
    for (let each = 0; each < leader.length; each++) {
      ends[each].add(blocks[each]);
      // All on the way down see a border where this one parts or ceases to look up.
      let at = each;
      let upto = lookup[each];
      while (at >= 0) {
        if (upto > shared[at]) ends[at].add(upto);
        upto = Math.min(upto, shared[at]);
        at = leader[at];
      }
    }
    this.parts = ends.map((each, request) => {
      const borders = [...each].filter((end) => end > shared[request]).sort((a, b) => a - b);
      return borders.map((end) => ({ end, users: [] }));
    });
    let users = 0;
    this.complete = true; // whether users are known
    for (const request of this.order) {
      let at = request;
      let upto = lookup[request];
      while (at >= 0 && upto > 0) {
        for (const part of this.parts[at]) {
          if (part.end > upto) break;
          part.users.push(request);
          users += 1;
        }
        upto = Math.min(upto, shared[at]);
        at = leader[at];
      }
      if (users > Contents.MOST_USERS) {
        this.complete = false;
        this.parts = null;
        return;
      }
    }
  }

  /** Return the request that is admitted next after `row` and looks this content up; -1: none. O(log). */
  nextUser(owner, position, row) {
    const parts = this.parts?.[owner] ?? [];
    const part = parts[firstIndex(parts.length, (each) => position < parts[each].end)];
    return part ? this._nextOf(part, row) : -1;
  }

  _nextOf({ users }, row) {
    return users[firstIndex(users.length, (each) => this.admitted[users[each]] > row)] ?? -1;
  }

  /** Yield the blocks `[first, end)` of a prompt as pieces of one content and one next user after `row`. */
  *uses(request, first, end, row) {
    for (const [owner, from, upto] of this.pieces(request, first, end)) {
      const parts = this.parts[owner];
      let at = firstIndex(parts.length, (each) => from < parts[each].end);
      for (let low = from; low < upto; at++) {
        const part = parts[at];
        const high = Math.min(upto, part?.end ?? upto);
        yield { owner, first: low, end: high, next: part ? this._nextOf(part, row) : -1 };
        low = high;
      }
    }
  }

  /** Return whether the optimum holds this content at `row`: it hits when it is asked for next. */
  heldByOptimum(owner, position, row) {
    const next = this.nextUser(owner, position, row);
    return next >= 0 && position < this.requests.optimum[next];
  }
}
Contents.MOST_USERS = 3e7;
