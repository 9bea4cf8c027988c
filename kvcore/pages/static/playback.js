// A trace that plays: columns are read, and the state of the pool is made from them, row by row.
//
//   rows ──► Cache.apply(row) ──► spans, sequences, tiers
//              ▲
//   Playback.seek(row): from the nearest state that was kept, forwards

/** Return typed columns by name from bytes as `pack` of playback.py lays them out. */
function unpack(bytes) {
  const end = bytes.indexOf(10);
  const about = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
  const columns = {};
  let at = end + 1;
  for (const { name, bytes: size, length } of about) {
    const column = size === 8 ? new Float64Array(length) : new Int32Array(length);
    const plane = (number) => bytes.subarray(at + number * length, at + (number + 1) * length);
    for (let number = 0; number < 4; number++) {
      const low = plane(number);
      if (size === 8) for (let i = 0; i < length; i++) column[i] += low[i] * 2 ** (8 * number);
      else for (let i = 0; i < length; i++) column[i] |= low[i] << (8 * number);
    }
    // Times are below 2**53 ns, which is three months.
    for (let number = 4; number < size; number++) {
      const high = plane(number);
      for (let i = 0; i < length; i++) if (high[i]) column[i] += high[i] * 2 ** (8 * number);
    }
    columns[name] = column;
    at += size * length;
  }
  return columns;
}

/** A run of cached blocks: the ids of the positions from `start` on. */
class Span {
  constructor(id, parent, start, ids, request, now) {
    Object.assign(this, { id, parent, start, ids, request });
    this.pins = 1; // sequences that hold it
    this.hits = 0; // requests that hit it, but for the one that stored it
    this.hitters = []; // the last of these
    this.stored = now;
    this.last = now; // time of its last hit, or when it was stored
    this.children = new Set();
  }

  get end() {
    return this.start + this.ids.length;
  }
}

/** An open sequence: the deepest span it holds, and its private blocks after that. */
class Sequence {
  constructor(id, request, span, opened) {
    Object.assign(this, { id, request, span, opened });
    this.ids = [];
    this.forgot = false; // whether it has dropped blocks, or was compacted
  }
}

/** What lies in a tier: no block without those before it, so of each owner's own the first ones. */
class Tier {
  constructor() {
    this.used = 0;
    this.ends = new Map(); // by owner of the content: the position after the last block that is here
    this.parked = new Map(); // blocks of preempted sequences, by request
  }

  clone() {
    const copy = Object.assign(new Tier(), this);
    copy.ends = new Map(this.ends);
    copy.parked = new Map(this.parked);
    return copy;
  }
}

/** Return a piece of a prompt as pieces `[owner, first, end)` of contents, in order. */
function contentPieces({ leader, shared }, request, first, end) {
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

const HITTERS = 8;
const PARKED = -2;

/** What is in the pool, as of a row. Times are ns, blocks ids, requests numbers. */
class Cache {
  constructor(blocks, tiers) {
    this.blocks = blocks;
    this.spans = new Map();
    this.roots = new Set();
    this.sequences = new Map();
    this.taken = new Int32Array(blocks).fill(-1); // the row that gave each block to its owner
    this.cached = 0;
    this.private = 0;
    this.tiers = tiers.map(() => new Tier());
    this.lookups = 0;
    this.hits = 0;
  }

  get free() {
    return this.blocks - this.cached - this.private;
  }

  /** Yield the spans from `span` up to the first blocks of its prompt. */
  static *path(span) {
    for (let at = span; at; at = at.parent) yield at;
  }

  /** Return a copy that shares nothing that changes. O(blocks in use). */
  clone() {
    const copy = Object.assign(Object.create(Cache.prototype), this);
    const twins = new Map();
    const twin = (span) => {
      if (!span) return null;
      let made = twins.get(span);
      if (!made) {
        made = Object.assign(Object.create(Span.prototype), span);
        twins.set(span, made);
        made.ids = span.ids.slice();
        made.hitters = span.hitters.slice();
      }
      return made;
    };
    copy.spans = new Map();
    for (const [id, span] of this.spans) copy.spans.set(id, twin(span));
    for (const [span, made] of twins) {
      made.parent = twin(span.parent);
      made.children = new Set([...span.children].map(twin));
    }
    copy.roots = new Set([...this.roots].map(twin));
    copy.sequences = new Map();
    for (const [id, seq] of this.sequences) {
      const made = Object.assign(Object.create(Sequence.prototype), seq);
      made.ids = seq.ids.slice();
      made.span = twin(seq.span);
      copy.sequences.set(id, made);
    }
    copy.taken = this.taken.slice();
    copy.tiers = this.tiers.map((tier) => tier.clone());
    return copy;
  }
}

/** A trace in the browser. */
class Playback {
  /** `about` is the document of playback.py, `columns` its columns. */
  constructor(about, columns) {
    this.about = about;
    this.header = about.header;
    this.requests = about.requests;
    this.words = about.words;
    this.columns = columns;
    this.length = columns.kind.length;
    this.kinds = Object.fromEntries(about.words.kinds.map((name, number) => [name, number]));
    this.times = columns.time; // as differences in the file
    for (let row = 1; row < this.length; row++) this.times[row] += this.times[row - 1];
    this.runs = new Int32Array(this.length + 1); // where the runs of each row begin
    for (let row = 0; row < this.length; row++) this.runs[row + 1] = this.runs[row] + columns.runs[row];
    this.begin = this.times[0];
    this.end = this.times[this.length - 1];
    this.appliers = about.words.kinds.map((name) => Playback.appliers[name] ?? null);
    this.reset();
    this.kept = [{ row: -1, cache: this.cache.clone() }];
    // So many copies of the state are kept that they take some 100 MB at most.
    const copies = Math.max(8, Math.min(64, Math.floor(8e6 / this.header.blocks)));
    this.stride = Math.max(2000, Math.ceil(this.length / copies));
  }

  /** Read the trace that is in the page under `name`. */
  static async read(name) {
    const [about, columns] = await Promise.all([readJson(`${name}-about`), readBytes(`${name}-rows`)]);
    return new Playback(about, unpack(columns));
  }

  reset() {
    this.row = -1; // the last row that is applied
    this.cache = new Cache(this.header.blocks, this.header.tiers ?? []);
  }

  /** The time of the state, in ns. */
  get now() {
    return this.row < 0 ? this.begin : this.times[this.row];
  }

  /** Return the last row that is not later than `time`. */
  rowAt(time) {
    let low = -1;
    let high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.times[middle] <= time) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Return what a row says: its kind by name, and the columns. */
  event(row) {
    const { kind, request, a, b, c, d, e, age } = this.columns;
    return {
      row, time: this.times[row], kind: this.words.kinds[kind[row]], request: request[row],
      a: a[row], b: b[row], c: c[row], d: d[row], e: e[row], age: age[row],
    };
  }

  /** Return the ids of the blocks of some runs of a row, the first run being `from`. */
  ids(row, from = 0, upto = Infinity) {
    const { run_first: first, run_count: count } = this.columns;
    const ids = [];
    const end = Math.min(this.runs[row + 1], this.runs[row] + upto);
    for (let run = this.runs[row] + from; run < end; run++) {
      const step = Math.sign(count[run]);
      for (let i = 0, id = first[run]; i !== count[run]; i += step, id += step) ids.push(id);
    }
    return ids;
  }

  /** Return how many blocks the runs of a row have. */
  blocksOf(row) {
    let blocks = 0;
    for (let run = this.runs[row]; run < this.runs[row + 1]; run++) blocks += Math.abs(this.columns.run_count[run]);
    return blocks;
  }

  /** Make the state that is after `row`. O(rows since the nearest state that was kept). */
  seek(row) {
    const target = Math.max(-1, Math.min(row, this.length - 1));
    const far = Math.floor((target + 1) / this.stride);
    const nearest = this.kept[Math.min(far, this.kept.length - 1)];
    if (target < this.row || nearest.row > this.row) {
      this.cache = nearest.cache.clone();
      this.row = nearest.row;
    }
    while (this.row < target) {
      this.row += 1;
      const apply = this.appliers[this.columns.kind[this.row]];
      if (apply) apply.call(this, this.row);
      if ((this.row + 1) % this.stride === 0 && this.kept.length === (this.row + 1) / this.stride) {
        this.kept.push({ row: this.row, cache: this.cache.clone() });
      }
    }
    return this.cache;
  }

  _open(row) {
    const { request, a } = this.columns;
    const seq = new Sequence(a[row], request[row], null, this.times[row]);
    this.cache.sequences.set(seq.id, seq);
    return seq;
  }

  _pin(seq, span, row, isHit) {
    seq.span = span;
    for (const each of Cache.path(span)) {
      each.pins += 1;
      each.last = this.times[row];
      if (isHit) {
        each.hits += 1;
        each.hitters.push(seq.request);
        if (each.hitters.length > HITTERS) each.hitters.shift();
      }
    }
  }

  _unpin(seq) {
    for (const span of Cache.path(seq.span)) span.pins -= 1;
    seq.span = null;
  }

  _count(row, hit) {
    if (this.columns.d[row]) return;
    this.cache.lookups += this.requests.lookup[this.columns.request[row]];
    this.cache.hits += hit;
  }

  _take(seq, ids, row) {
    for (const id of ids) this.cache.taken[id] = row;
    seq.ids.push(...ids);
    this.cache.private += ids.length;
  }

  _store(row) {
    const { request, a, b, c } = this.columns;
    const tier = this.cache.tiers[a[row]];
    tier.used += c[row];
    for (const [owner, , end] of contentPieces(this.requests, request[row], b[row], b[row] + c[row])) {
      tier.ends.set(owner, end);
    }
  }

  _give(row, runs = Infinity) {
    const ids = this.ids(row, 0, runs);
    for (const id of ids) this.cache.taken[id] = -1;
    return ids;
  }
}

/** By kind of row: how it changes the state. Kinds that are not here change nothing. */
Playback.appliers = {
  HIT(row) {
    const { b, c, d } = this.columns;
    this._count(row, b[row]);
    this._pin(this._open(row), this.cache.spans.get(c[row]), row, !d[row]);
  },
  MISS(row) {
    // After a HIT of the same admission the sequence is open already.
    if (this.cache.sequences.has(this.columns.a[row])) return;
    this._count(row, 0);
    this._open(row);
  },
  PREFETCH(row) {
    const seq = this._open(row);
    if (this.columns.b[row]) this._pin(seq, this.cache.spans.get(this.columns.c[row]), row, false);
  },
  SPLIT(row) {
    const { a, b, c } = this.columns;
    const lower = this.cache.spans.get(a[row]);
    const cut = c[row] - lower.start;
    const upper = Object.assign(Object.create(Span.prototype), lower);
    Object.assign(upper, { id: b[row], ids: lower.ids.slice(0, cut), hitters: lower.hitters.slice() });
    upper.children = new Set([lower]);
    const siblings = lower.parent ? lower.parent.children : this.cache.roots;
    siblings.delete(lower);
    siblings.add(upper);
    Object.assign(lower, { start: c[row], ids: lower.ids.slice(cut), parent: upper });
    this.cache.spans.set(upper.id, upper);
  },
  ALLOC(row) {
    this._take(this.cache.sequences.get(this.columns.a[row]), this.ids(row), row);
  },
  COMMIT(row) {
    const { a, b, c, d } = this.columns;
    const cache = this.cache;
    const seq = cache.sequences.get(a[row]);
    const ids = seq.ids.splice(0, c[row]);
    const how = this.words.committed[d[row]];
    if (how === "same" || how === "shared") {
      // Its own blocks, if it had any, are freed by the next line.
      seq.span = cache.spans.get(b[row]);
      seq.span.pins += 1;
      return;
    }
    cache.cached += ids.length;
    cache.private -= ids.length;
    if (how === "grown") {
      seq.span.ids.push(...ids);
      return;
    }
    const span = new Span(b[row], seq.span, seq.span ? seq.span.end : 0, ids, seq.request, this.times[row]);
    (seq.span ? seq.span.children : cache.roots).add(span);
    cache.spans.set(span.id, span);
    seq.span = span;
  },
  EVICT(row) {
    const span = this.cache.spans.get(this.columns.a[row]);
    const ids = this._give(row);
    this.cache.cached -= ids.length;
    span.ids.length -= ids.length;
    if (span.ids.length) return;
    this.cache.spans.delete(span.id);
    (span.parent ? span.parent.children : this.cache.roots).delete(span);
  },
  FORGET(row) {
    const seq = this.cache.sequences.get(this.columns.a[row]);
    const gone = new Set(this._give(row));
    this.cache.private -= gone.size;
    seq.ids = seq.ids.filter((id) => !gone.has(id));
    seq.forgot = true;
  },
  COMPACT(row) {
    const seq = this.cache.sequences.get(this.columns.a[row]);
    const freed = this._give(row, this.columns.d[row]);
    const before = new Set(seq.ids);
    seq.ids = this.ids(row, this.columns.d[row]);
    const fresh = seq.ids.filter((id) => !before.has(id));
    for (const id of fresh) this.cache.taken[id] = row;
    this.cache.private += fresh.length - freed.length;
    seq.forgot = true;
    this._unpin(seq);
  },
  FREE(row) {
    const { a, b, d } = this.columns;
    const seq = this.cache.sequences.get(a[row]);
    const reason = this.words.freed[b[row]];
    this.cache.private -= this._give(row, d[row]).length;
    if (reason === "rollback") seq.ids = this.ids(row, d[row]);
    if (reason !== "close") return;
    this._unpin(seq);
    this.cache.sequences.delete(seq.id);
  },
  FORK(row) {
    const { a, b } = this.columns;
    const seq = this.cache.sequences.get(a[row]);
    const child = new Sequence(b[row], seq.request, seq.span, this.times[row]);
    child.ids = seq.ids.slice();
    child.forgot = seq.forgot;
    for (const span of Cache.path(seq.span)) span.pins += 1;
    this.cache.sequences.set(child.id, child);
  },
  COPY(row) {
    const { a, d } = this.columns;
    const seq = this.cache.sequences.get(a[row]);
    seq.ids[seq.ids.length - 1] = d[row];
    this.cache.taken[d[row]] = row;
    this.cache.private += 1;
  },
  RECOVER(row) {
    this._store(row);
  },
  OFFLOAD(row) {
    const { request, a, c, d } = this.columns;
    if (d[row] !== PARKED) {
      this._store(row);
      return;
    }
    const tier = this.cache.tiers[a[row]];
    tier.used += c[row];
    tier.parked.set(request[row], c[row]);
  },
  DROP(row) {
    const { request, a, b, c, d } = this.columns;
    const tier = this.cache.tiers[a[row]];
    tier.used -= c[row];
    if (this.words.dropped[d[row]] === "parked") {
      tier.parked.delete(request[row]);
      return;
    }
    for (const [owner, first] of contentPieces(this.requests, request[row], b[row], b[row] + c[row])) {
      if (first > this.requests.shared[owner]) tier.ends.set(owner, first);
      else tier.ends.delete(owner);
    }
  },
};
