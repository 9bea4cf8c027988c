// Which blocks of prompts are the same content, who asks for it next, and what the optimum holds.
//
// A prompt shares its first blocks with its leader and has the rest for itself, so each content
// has one name: the request that first had it, and the position there.
//
//   leader  0 ─────────┬──────────── 9        content of request 7 at 2: (leader, 2)
//   request 7          └───────── 8           content of request 7 at 6: (7, 6)
//                      ▲ shared = 4

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
    const { leader, shared } = this.requests;
    const found = [];
    let high = end;
    for (let at = request; high > first; at = leader[at]) {
      if (high > shared[at]) {
        found.push([at, Math.max(first, shared[at]), high]);
        high = shared[at];
      }
      if (leader[at] < 0) break;
    }
    return found.reverse();
  }

  /** Record the row of each first admission, and requests in that order. */
  _admissions(playback) {
    const { kind, request, d } = playback.columns;
    const { HIT, MISS } = playback.kinds;
    this.admitted = new Int32Array(this.requests.id.length).fill(-1);
    this.order = [];
    for (let row = 0; row < playback.length; row++) {
      if ((kind[row] !== HIT && kind[row] !== MISS) || d[row]) continue;
      if (this.admitted[request[row]] >= 0) continue;
      this.admitted[request[row]] = row;
      this.order.push(request[row]);
    }
  }

  /** Divide each request's own blocks where others part, and list who uses each part. */
  _uses() {
    const { leader, shared, lookup, blocks } = this.requests;
    const ends = leader.map(() => new Set());
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
    const part = this.parts?.[owner].find((each) => position < each.end);
    if (!part) return -1;
    let low = 0;
    let high = part.users.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.admitted[part.users[middle]] <= row) low = middle + 1;
      else high = middle;
    }
    return part.users[low] ?? -1;
  }

  /** Return whether the optimum holds this content at `row`: it hits when it is asked for next. */
  heldByOptimum(owner, position, row) {
    const next = this.nextUser(owner, position, row);
    return next >= 0 && position < this.requests.optimum[next];
  }
}
Contents.MOST_USERS = 3e7;
