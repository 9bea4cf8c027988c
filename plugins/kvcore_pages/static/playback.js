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
    const halves = [new Int32Array(length), new Int32Array(size === 8 ? length : 0)];
    for (let number = 0; number < size; number++, at += length) {
      const plane = bytes.subarray(at, at + length);
      const half = halves[number >> 2];
      const shift = 8 * (number % 4);
      for (let i = 0; i < length; i++) if (plane[i]) half[i] |= plane[i] << shift;
    }
    const [low, high] = halves;
    // Exact, since all are below 2**53.
    columns[name] = size === 4 ? low : Float64Array.from(low, (value, i) => high[i] * 2 ** 32 + (value >>> 0));
  }
  return columns;
}

/**
 * A run of cached blocks: the ids of the positions from `start` on.
 *
 * Positions count blocks of the header. Of cache groups some have smaller blocks: `step` is the part of one that each is.
 */
class Span {
  constructor(id, parent, start, ids, request, now) {
    Object.assign(this, { id, parent, start, ids, request });
    this.step = 1;
    this.pins = 1; // sequences that hold it
    this.hits = 0; // requests that hit it, but for the one that stored it
    this.hitters = []; // the last of these; replaced, never changed
    this.stored = now;
    this.last = now; // time of its last hit, or when it was stored
    this.children = new Set();
  }

  get end() {
    return this.start + this.step * this.ids.length;
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

/** The contents of a tier: of each owner's own blocks the first ones, as none is there without those before it. */
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

/** How many of the last requests that hit a span are kept. */
const HITTERS = 8;

/** The tier in a row of OFFLOAD whose blocks are those of a preempted sequence. */
const PARKED = -2;

/** The free blocks: those that were freed last are given first, then the unused ones, ascending. */
class FreeBlocks {
  constructor(freed, fresh) {
    this.freed = freed;
    this.fresh = fresh; // all from here on are unused
    this.victims = []; // evicted for the call that goes on, which takes them last
    this.owners = new Map(); // how many owners a block has beyond the first
  }

  clone() {
    const copy = new FreeBlocks(this.freed.slice(), this.fresh);
    copy.victims = this.victims.slice();
    copy.owners = new Map(this.owners);
    return copy;
  }

  /** Take blocks from a pool of `blocks`. */
  take(count, blocks) {
    const stacked = Math.min(count, this.freed.length);
    const ids = stacked ? this.freed.splice(-stacked).reverse() : [];
    const unused = Math.min(count - stacked, blocks - this.fresh);
    while (ids.length < stacked + unused) ids.push(this.fresh++);
    return ids.concat(this.victims.splice(0, count - ids.length));
  }

  give(ids) {
    for (const id of ids) this.freed.push(id);
  }

  share(ids) {
    for (const id of ids) this.owners.set(id, (this.owners.get(id) ?? 0) + 1);
  }

  /** Remove an owner from a block; return whether it has another. */
  unshare(id) {
    const others = this.owners.get(id) ?? 0;
    if (others > 1) this.owners.set(id, others - 1);
    else this.owners.delete(id);
    return others > 0;
  }
}

/** The contents of the pool at a row. Times are ns, blocks ids, requests numbers. */
class Cache {
  /** An empty pool of `blocks`, of which the run uses the first `used`. */
  constructor(blocks, used, tiers) {
    this.blocks = blocks;
    this.spans = new Map();
    this.roots = new Set();
    this.sequences = new Map();
    this.pool = new FreeBlocks([], 0);
    this.duplicates = []; // what a COMMIT `same` leaves to the FREE after it
    this.taken = new Int32Array(used).fill(-1); // the row that gave each block to its owner
    this.cached = 0;
    this.private = 0;
    this.tiers = tiers.map(() => new Tier());
    this.lookups = 0;
    this.hits = 0;
  }

  /** Make the state that `begin` of playback.py describes. */
  restore({ spans, sequences, freed, fresh, owners, lookups, hits, tiers }) {
    Object.assign(this, { lookups, hits });
    this.tiers = tiers.map(({ used, ends, parked }) =>
      Object.assign(new Tier(), { used, ends: new Map(ends), parked: new Map(parked) }));
    this.pool = new FreeBlocks(freed, fresh);
    this.pool.owners = new Map(owners);
    spans.id.forEach((id, at) => {
      const span = new Span(id, null, spans.start[at], spans.ids[at], spans.request[at], spans.stored[at]);
      this.spans.set(id, Object.assign(span, { pins: 0, hits: spans.hits[at], last: spans.last[at] }));
      this.cached += span.ids.length;
    });
    spans.id.forEach((id, at) => {
      const [span, parent] = [this.spans.get(id), this.spans.get(spans.parent[at]) ?? null];
      span.parent = parent;
      (parent ? parent.children : this.roots).add(span);
    });
    const own = new Set();
    sequences.id.forEach((id, at) => {
      const span = this.spans.get(sequences.span[at]) ?? null;
      const seq = new Sequence(id, sequences.request[at], span, sequences.opened[at]);
      seq.ids = sequences.ids[at];
      for (const each of Cache.path(span)) each.pins += 1;
      for (const block of seq.ids) own.add(block);
      this.sequences.set(id, seq);
    });
    this.private = own.size;
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
    copy.pool = this.pool.clone();
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
    this.times = Float64Array.from(columns.time); // differences in the file, which may be of 4 bytes
    for (let row = 1; row < this.length; row++) this.times[row] += this.times[row - 1];
    this.begin = this.times[0];
    this.end = this.times[this.length - 1];
    this.appliers = about.words.kinds.map((name) => Playback.appliers[name] ?? null);
    this.seen = -1; // the last row that was ever run
    this.moved = new Int32Array(1 << 12); // the blocks that rows up to there move, one row after another
    this.movedAt = new Float64Array(this.length + 1); // by row: where its blocks begin there
    this.movedEnd = 0; // where the next ones go
    this.reset();
    this.kept = [{ row: -1, cache: this.cache.clone() }];
    // So many copies of the state are kept that they take some 100 MB at most.
    const copies = Math.max(8, Math.min(64, Math.floor(8e6 / this.header.blocks)));
    this.stride = Math.max(2000, Math.ceil(this.length / copies));
  }

  /** Read the trace that is in the page under `name`. */
  static async read(name) {
    const about = await readJson(`${name}-about`);
    Object.assign(about.requests, unpack(await readBytes(`${name}-requests`)));
    const Kind = about.header.cache_groups ? GroupPlayback : Playback;
    return new Kind(about, unpack(await readBytes(`${name}-rows`)));
  }

  /** Return why a request missed, in sentences. Written by `share_phrases`. */
  why(request) {
    const { why } = this.requests;
    this.whys ??= why.uses.split("\n");
    const words = this.whys[request].split(" ");
    const lines = [];
    for (let at = 0; at < words.length && words[at]; ) {
      const parts = why.lines[Number(words[at++])].split("\0");
      lines.push(parts.reduce((text, part) => text + words[at++] + part));
    }
    return lines.join("\n");
  }

  reset() {
    this.row = -1; // the last row that is applied
    this.cache = new Cache(this.header.blocks, this.about.pool, this.header.tiers ?? []);
    if (this.about.begin) this.cache.restore(structuredClone(this.about.begin));
  }

  /** The time of the state, in ns. */
  get now() {
    return this.row < 0 ? this.begin : this.times[this.row];
  }

  /** Return the last row that is not later than `time`. */
  rowAt(time) {
    return countUpTo(this.times, time) - 1;
  }

  /** Return a row with its kind by name, and its columns. */
  event(row) {
    const { kind, request, a, b, c, d, e, count, age } = this.columns;
    return {
      row, time: this.times[row], kind: this.words.kinds[kind[row]], request: request[row],
      a: a[row], b: b[row], c: c[row], d: d[row], e: e[row], count: count[row], age: age[row],
    };
  }

  /** Return how many blocks a row takes from the pool or gives back, beside those that a COMPACT takes. */
  blocksOf(row) {
    return this.columns.count[row];
  }

  /** Return the ids of the blocks that a row moves; of a COMPACT, first those taken. Rows not yet seen are run. */
  ids(row) {
    if (row > this.seen) {
      const [here, before] = [this.cache, this.row];
      this.cache = here.clone(); // panels hold what is shown
      this.seek(row + Playback.AHEAD);
      [this.cache, this.row] = [here, before];
    }
    return this.moved.subarray(this.movedAt[row], this.movedAt[row + 1]);
  }

  /** Record the blocks that a row moves, when it is first run. */
  _note(ids, row) {
    if (row !== this.seen + 1) return;
    const end = this.movedEnd + ids.length;
    if (end > this.moved.length) {
      const larger = new Int32Array(2 * end);
      larger.set(this.moved);
      this.moved = larger;
    }
    this.moved.set(ids, this.movedEnd);
    this.movedEnd = end;
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
      if (this.row > this.seen) {
        this.seen = this.row;
        this.movedAt[this.row + 1] = this.movedEnd;
      }
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
        each.hitters = [...each.hitters, seq.request].slice(-HITTERS);
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

  /** Give a sequence blocks of its own. */
  _take(seq, count, row) {
    const ids = this.cache.pool.take(count, this.cache.blocks);
    for (const id of ids) {
      this.cache.taken[id] = row;
      seq.ids.push(id);
    }
    this._note(ids, row);
    this.cache.private += count;
  }

  _store(row) {
    const { request, a, b, c } = this.columns;
    const tier = this.cache.tiers[a[row]];
    tier.used += c[row];
    for (const [owner, , end] of contentPieces(this.requests, request[row], b[row], b[row] + c[row])) {
      tier.ends.set(owner, end);
    }
  }

  /** Free those of some blocks that have no other owner, deepest first. */
  _release(ids, row) {
    const { pool } = this.cache;
    const free = ids.reverse().filter((id) => !pool.unshare(id));
    this._give(free, row);
    this.cache.private -= free.length;
  }

  _give(ids, row) {
    this._note(ids, row);
    for (const id of ids) this.cache.taken[id] = -1;
    this.cache.pool.give(ids);
  }
}

/** How many rows more are run where one is asked for that was never run. */
Playback.AHEAD = 2000;

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
    Object.assign(upper, { id: b[row], ids: lower.ids.slice(0, cut), hitters: lower.hitters });
    upper.children = new Set([lower]);
    const siblings = lower.parent ? lower.parent.children : this.cache.roots;
    siblings.delete(lower);
    siblings.add(upper);
    Object.assign(lower, { start: c[row], ids: lower.ids.slice(cut), parent: upper });
    this.cache.spans.set(upper.id, upper);
  },
  ALLOC(row) {
    this._take(this.cache.sequences.get(this.columns.a[row]), this.columns.count[row], row);
    // Where leaves leave whole, more may have left than are taken.
    if (this.header.plugins.prefix?.options.evict === "leaf") this.cache.pool.give(this.cache.pool.victims.splice(0));
  },
  COMMIT(row) {
    const { a, b, c, d } = this.columns;
    const cache = this.cache;
    const seq = cache.sequences.get(a[row]);
    const ids = seq.ids.splice(0, c[row]);
    const how = this.words.committed[d[row]];
    if (how === "same" || how === "shared") {
      if (how === "same") cache.duplicates = ids; // freed by the next row
      else ids.forEach((id) => cache.pool.unshare(id));
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
    const { a, c, count } = this.columns;
    const { cache } = this;
    const span = cache.spans.get(a[row]);
    const ids = span.ids.splice(-count[row]).reverse();
    cache.cached -= ids.length;
    // An engine may evict before it needs room: then the blocks are free.
    if (c[row] || this.header.engine) this._give(ids, row);
    else {
      this._note(ids, row);
      for (const id of ids) cache.taken[id] = -1;
      cache.pool.victims.push(...ids);
    }
    if (span.ids.length) return;
    cache.spans.delete(span.id);
    (span.parent ? span.parent.children : cache.roots).delete(span);
  },
  FORGET(row) {
    const { a, d, count } = this.columns;
    const seq = this.cache.sequences.get(a[row]);
    this._release(seq.ids.splice(d[row], count[row]), row);
    seq.forgot = true;
  },
  COMPACT(row) {
    const { a, d, count } = this.columns;
    const { pool } = this.cache;
    const seq = this.cache.sequences.get(a[row]);
    const own = seq.ids.filter((id) => !pool.owners.has(id));
    const shared = seq.ids.filter((id) => pool.owners.has(id));
    const dropped = own.splice(own.length - count[row]);
    seq.ids = own;
    this._take(seq, d[row], row);
    this._release(dropped, row);
    shared.forEach((id) => pool.unshare(id));
    seq.forgot = true;
    this._unpin(seq);
  },
  FREE(row) {
    const { a, b, c } = this.columns;
    const seq = this.cache.sequences.get(a[row]);
    const reason = this.words.freed[b[row]];
    this._release(reason === "duplicate" ? this.cache.duplicates.slice() : seq.ids.splice(c[row]), row);
    this.cache.duplicates = [];
    if (reason !== "close") return;
    this._unpin(seq);
    this.cache.sequences.delete(seq.id);
  },
  FORK(row) {
    const { a, b } = this.columns;
    const seq = this.cache.sequences.get(a[row]);
    const child = new Sequence(b[row], seq.request, seq.span, this.times[row]);
    child.ids = seq.ids.slice();
    this.cache.pool.share(child.ids);
    child.forgot = seq.forgot;
    for (const span of Cache.path(seq.span)) span.pins += 1;
    this.cache.sequences.set(child.id, child);
  },
  COPY(row) {
    const seq = this.cache.sequences.get(this.columns.a[row]);
    this.cache.pool.unshare(seq.ids.pop());
    this._take(seq, 1, row);
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
