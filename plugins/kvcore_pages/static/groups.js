// A trace of cache groups that plays. Its rows bring the ids of their blocks, as grouped_playback.py says.
//
// A span is here a run of blocks of one group that got their names together and have as many
// holders: it has no parent, and is cut where only some of its blocks are held, or leave.

/** Return the spans that have exactly these blocks; one that has others too is cut. */
function spansOf(cache, ids) {
  const wanted = new Set(ids);
  const spans = new Set(Array.from(ids, (id) => cache.spanOf.get(id)));
  return [...spans].flatMap((span) => cutSpan(cache, span, wanted));
}

/** Cut a span between blocks that are wanted and others; return the parts that are wanted. */
function cutSpan(cache, span, wanted) {
  const runs = [];
  span.ids.forEach((id, at) => {
    const is = wanted.has(id);
    if (runs.at(-1)?.is === is) runs.at(-1).ids.push(id);
    else runs.push({ is, start: span.start + span.step * at, ids: [id] });
  });
  return runs.map(({ is, start, ids }, at) => {
    const part = at ? Object.assign(Object.create(Span.prototype), span, { id: cache.nextSpan++, children: new Set() }) : span;
    Object.assign(part, { start, ids });
    cache.addRoot(part);
    return is ? part : null;
  }).filter(Boolean);
}

/** The contents of a pool of cache groups. */
class GroupCache extends Cache {
  constructor(blocks, used, tiers, steps) {
    super(blocks, used, tiers);
    this.steps = steps; // by group: that of its spans
    this.spanOf = new Map(); // by block
    this.groupOf = new Int32Array(used); // by block in use
    this.nextSpan = 0;
  }

  restore(begin) {
    super.restore(begin);
    for (const [id, group] of begin.groups) this.groupOf[id] = group;
    begin.spans.id.forEach((id, at) => {
      const span = this.spans.get(id);
      span.pins = begin.spans.pins[at];
      span.group = this.groupOf[span.ids[0]];
      span.step = this.steps[span.group];
      span.start *= span.step;
      this.addRoot(span);
      this.nextSpan = Math.max(this.nextSpan, id + 1);
    });
    begin.sequences.id.forEach((id, at) =>
      Object.assign(this.sequences.get(id), { forgot: true, again: begin.sequences.again[at] }));
  }

  addRoot(span) {
    this.spans.set(span.id, span);
    this.roots.add(span);
    for (const id of span.ids) this.spanOf.set(id, span);
  }

  removeRoot(span) {
    this.spans.delete(span.id);
    this.roots.delete(span);
    for (const id of span.ids) this.spanOf.delete(id);
  }

  clone() {
    const copy = Object.setPrototypeOf(super.clone(), GroupCache.prototype);
    copy.groupOf = this.groupOf.slice();
    copy.spanOf = new Map();
    for (const span of copy.spans.values()) for (const id of span.ids) copy.spanOf.set(id, span);
    return copy;
  }
}

/** A trace of cache groups in the browser. */
class GroupPlayback extends Playback {
  /** The group whose blocks stand for a prompt where one number is shown: the first with full attention. */
  get main() {
    return Math.max(0, this.header.cache_groups.groups.findIndex(({ kind }) => kind === "full"));
  }

  /** The blocks of the header that a block of a group stands for: 1, or a part of one. */
  step(group) {
    return this.header.cache_groups.groups[group].block_size / this.header.block_size;
  }

  reset() {
    this.row = -1;
    const steps = this.header.cache_groups.groups.map((_, group) => this.step(group));
    this.cache = new GroupCache(this.header.blocks, this.about.pool, this.header.tiers ?? [], steps);
    if (this.about.begin) this.cache.restore(structuredClone(this.about.begin));
    this.appliers = this.words.kinds.map((name) => GroupPlayback.appliers[name] ?? null);
    this.seen = Infinity; // rows bring their blocks, and need not be run for these
  }

  /** Return the ids of the blocks that a row takes from the pool or gives back to it. */
  ids(row) {
    return this.members(row).subarray(0, this.columns.count[row]);
  }

  /** Open the sequence of a HIT or MISS. Its blocks are of several groups: their positions do not follow one another. */
  _open(row) {
    return Object.assign(super._open(row), { forgot: true, again: Boolean(this.columns.d[row]) });
  }

  /** Add a sequence to the holders of the blocks that a row is about. */
  _hold(seq, row) {
    for (const span of spansOf(this.cache, this.members(row))) {
      span.pins += 1;
      span.last = this.times[row];
      if (seq.again) continue;
      span.hits += 1;
      span.hitters = [...span.hitters, seq.request].slice(-HITTERS);
    }
  }

  /** Return the ids of all blocks that a row is about. */
  members(row) {
    const { moved, ends } = this.columns;
    return moved.subarray(row ? ends[row - 1] : 0, ends[row]);
  }
}

GroupPlayback.appliers = {
  HIT(row) {
    this._count(row, this.columns.b[row]);
    this._hold(this._open(row), row);
  },
  MISS: Playback.appliers.MISS,
  LOAD_START(row) {
    this._hold(this.cache.sequences.get(this.columns.d[row]), row);
  },
  OFFLOAD(row) {
    const { a, c } = this.columns;
    this.cache.tiers[a[row]].used += c[row];
  },
  DROP(row) {
    const { a, c } = this.columns;
    this.cache.tiers[a[row]].used -= c[row];
  },
  ALLOC(row) {
    const { a, c } = this.columns;
    const seq = this.cache.sequences.get(a[row]);
    for (const id of this.members(row)) {
      this.cache.taken[id] = row;
      this.cache.groupOf[id] = c[row];
      seq.ids.push(id);
      this.cache.private += 1;
    }
  },
  COMMIT(row) {
    const { a, b, c, e } = this.columns;
    const { cache } = this;
    const seq = cache.sequences.get(a[row]);
    const ids = [...this.members(row)];
    const named = new Set(ids);
    seq.ids = seq.ids.filter((id) => !named.has(id));
    const step = cache.steps[e[row]];
    const span = new Span(cache.nextSpan++, null, step * b[row], ids, seq.request, this.times[row]);
    cache.addRoot(Object.assign(span, { group: e[row], step }));
    cache.cached += c[row];
    cache.private -= c[row];
  },
  EVICT(row) {
    const { cache } = this;
    const ids = this.members(row);
    for (const span of spansOf(cache, ids)) cache.removeRoot(span);
    for (const id of ids) cache.taken[id] = -1;
    cache.cached -= ids.length;
  },
  FREE(row) {
    const { a, b, count } = this.columns;
    const { cache } = this;
    const seq = cache.sequences.get(a[row]);
    const free = new Set(this.ids(row));
    for (const id of free) cache.taken[id] = -1;
    seq.ids = seq.ids.filter((id) => !free.has(id));
    cache.private -= free.size;
    for (const span of spansOf(cache, this.members(row).subarray(count[row]))) {
      span.pins -= 1;
      span.last = this.times[row];
    }
    if (this.words.freed[b[row]] === "close") cache.sequences.delete(seq.id);
  },
};

/** Return a cache group in words: `group 0, a window of 1024 tokens`, and the size of its blocks if others have another. */
function groupName({ cache_groups: { groups } }, number) {
  const { kind, window, block_size } = groups[number];
  const kept = { full: "all tokens", window: `a window of ${window} tokens`, chunk: `chunks of ${window} tokens`, state: "a state" };
  const size = groups.every((each) => each.block_size === block_size) ? "" : `, ${format.counted(block_size, "token")} a block`;
  return `group ${number}, ${kept[kind]}${size}`;
}
