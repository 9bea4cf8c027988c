// The lives of requests: phases, evictions and admissions, found once from all rows.
//
//   REQUEST ─ queued ─ HIT/MISS ─ prefill ─ FIRST_TOKEN ─ decode ─ FINISH
//                                 ▲ loading: LOAD_START to LOAD       ▲ preempted: PREEMPT to RESUME or HIT/MISS

const PHASES = ["queued", "loading", "prefill", "decode", "preempted"];
const PHASE = Object.fromEntries(PHASES.map((name, kind) => [name, kind]));

/** The lives of all requests of a trace, in rows, by the rules of kvcore_replay.timeline. */
class Lives {
  constructor(playback) {
    const count = playback.requests.id.length;
    const rows = () => new Int32Array(count).fill(-1);
    this.playback = playback;
    this.untimed = playback.header.mode === "untimed";
    for (const name of ["arrived", "admitted", "first", "finished", "rejected"]) this[name] = rows();
    this.phases = { request: [], kind: [], start: [], end: [], whom: [] };
    this.chunks = { request: [], row: [] };
    this.starts = PHASES.map(() => []); // rows, by kind
    this.ends = PHASES.map(() => []);
    this.evictions = { row: [], blocks: [] }; // blocks: so far
    this.admissions = { row: [], lookups: [], hits: [] }; // so far
    const { lookups = 0, hits = 0 } = playback.about.begin ?? {};
    this.before = { lookups, hits }; // before the first row
    this._under = rows(); // the phase under way
    this.earlier = new Set(); // requests that arrived before the first row
    this._pass();
    this.phasesOf = groups(this.phases.request, count);
    this.chunksOf = groups(this.chunks.request, count);
    this.preempted = [...this.phases.whom.keys()].filter((phase) => this.phases.whom[phase] >= 0); // for whom is known
    this._lanes();
  }

  /** Return the lives of a side, which are found when they are first asked for. */
  static of(side) {
    side.lives ??= new Lives(side.playback);
    return side.lives;
  }

  /** Return the phase of a request at a row, a value of PHASE; -1: it is not there. */
  phaseAt(request, row) {
    const phase = this.phaseIndexAt(request, row);
    return phase < 0 ? -1 : this.phases.kind[phase];
  }

  /** Return the phase that a request is in after `row`; -1: none. */
  phaseIndexAt(request, row) {
    const { start, end } = this.phases;
    const last = this.playback.length - 1;
    return this.phasesOf(request).findLast((each) => start[each] <= row && (row < end[each] || end[each] === last)) ?? -1;
  }

  /** Return how many requests are in a phase after `row`. */
  countAt(kind, row) {
    return countUpTo(this.starts[kind], row) - countUpTo(this.ends[kind], row);
  }

  /** Return how many blocks were evicted up to `row`. */
  evictedAt(row) {
    const { row: rows, blocks } = this.evictions;
    return blocks[countUpTo(rows, row) - 1] ?? 0;
  }

  /** Return the hit ratio over the `window` ns up to the time of `row`; null without a lookup. */
  ratioAt(row, window) {
    const { times } = this.playback;
    const { row: rows, lookups, hits } = this.admissions;
    const last = countUpTo(rows, row) - 1;
    const before = firstIndex(rows.length, (each) => times[rows[each]] > times[Math.max(0, row)] - window) - 1;
    const since = (sums, sum) => (sums[last] ?? sum) - (sums[before] ?? sum);
    const asked = since(lookups, this.before.lookups);
    return asked ? since(hits, this.before.hits) / asked : null;
  }

  /** Return the EVICT rows that made room for a request, and those that took blocks of its prompt. */
  evictionsOf(request, contents) {
    if (this._asked?.request === request) return this._asked;
    const { columns, requests } = this.playback;
    const own = new Map();
    for (const [owner, first, end] of contents.pieces(request, 0, requests.blocks[request])) own.set(owner, [first, end]);
    const rows = this.evictions.row;
    const takes = (row) => contents.pieces(columns.d[row], columns.e[row] - this.playback.blocksOf(row), columns.e[row])
      .some(([owner, first, end]) => own.has(owner) && first < own.get(owner)[1] && own.get(owner)[0] < end);
    this._asked = { request, made: rows.filter((row) => columns.request[row] === request), took: rows.filter(takes) };
    return this._asked;
  }

  /** End the phase of a request that is under way, and begin another if `kind` is one. */
  _begin(request, kind, row, whom = -1) {
    const { phases } = this;
    const last = this._under[request];
    if (last >= 0) {
      phases.end[last] = row;
      this.ends[phases.kind[last]].push(row);
    }
    this._under[request] = kind < 0 ? -1 : phases.request.length;
    if (kind < 0) return;
    this.starts[kind].push(row);
    this._add(request, kind, row, this.playback.length - 1, whom);
  }

  _add(...values) {
    Object.values(this.phases).forEach((column, at) => column.push(values[at]));
  }

  /** Add that a request waited until it was opened again. */
  _waited(request, start, end) {
    this.finished[request] = -1;
    this._add(request, PHASE.preempted, start, end, -1);
  }

  /** Begin the phases that go on at the first row, if that is not the first of the trace. */
  _begun(owners, open, depths, answered) {
    const { playback, untimed, admitted, earlier } = this;
    const { begin } = playback.about;
    if (!begin) return;
    const { kind, request } = playback.columns;
    const { admitted: lines } = playback.requests;
    const { first } = playback.about;
    for (const each of begin.answered) answered.add(each);
    for (const [each, preempted] of begin.waiting) this._begin(each, preempted ? PHASE.preempted : PHASE.queued, 0);
    begin.sequences.id.forEach((seq, at) => {
      const each = begin.sequences.request[at];
      if (lines[each] < 0 || lines[each] >= first) return; // opened ahead, to load
      owners.set(seq, each);
      depths.set(seq, Infinity);
      open[each] += 1;
      admitted[each] = 0;
      if (this._under[each] < 0) this._begin(each, untimed || answered.has(each) ? PHASE.decode : PHASE.prefill, 0);
    });
    const came = new Set(request.filter((_, row) => kind[row] === playback.kinds.REQUEST)); // may have been announced
    for (let each = 0; each < begin.numbers; each++) if (!came.has(each)) earlier.add(each);
  }

  /** Go through all rows. */
  _pass() {
    const { playback, untimed, arrived, admitted, first, finished, phases, evictions, admissions } = this;
    const { columns, times, kinds, words, requests, header } = playback;
    const { kind, request, a, b, c, d, e } = columns;
    const owners = new Map(); // requests of open sequences
    const depths = new Map(); // blocks that these have committed, from the first on
    const open = new Int32Array(requests.id.length);
    const before = new Map(); // what a paused request did
    const answered = new Set(); // requests that had their first token
    let returned = []; // requests that hit all they can share: computed when the next step ends
    let evicted = 0;
    let { lookups, hits } = this.before;
    const doing = (each) => (this._under[each] < 0 ? -1 : phases.kind[this._under[each]]);
    const since = (each) => times[phases.start[this._under[each]]];
    const tokenBlocks = (each) => Math.ceil(requests.tokens[each] / header.block_size);
    const length = (each) => (header.count === "keys" ? requests.blocks[each] : tokenBlocks(each));
    const shareable = (each) => (requests.blocks[each] > tokenBlocks(each) ? requests.blocks : requests.lookup)[each];
    const computed = (each, row) => {
      if (untimed || answered.has(each)) this._begin(each, PHASE.decode, row);
    };
    const admit = (row) => {
      const each = request[row];
      const blocks = kind[row] === kinds.HIT ? b[row] : 0;
      if (owners.has(a[row])) return;
      owners.set(a[row], each);
      depths.set(a[row], blocks);
      open[each] += 1;
      if (!d[row]) {
        admissions.row.push(row);
        admissions.lookups.push((lookups += requests.lookup[each]));
        admissions.hits.push((hits += blocks));
      }
      if (admitted[each] < 0) admitted[each] = row;
      else if (doing(each) < 0) this._waited(each, finished[each], row); // without a clock it had been closed
      this._begin(each, PHASE.prefill, row);
      if (answered.has(each) && blocks >= shareable(each)) returned.push(each);
    };
    const load = (from, to) => (row) => {
      const each = owners.get(d[row]);
      if (each !== undefined && doing(each) === from) this._begin(each, to, row);
    };
    const does = {
      REQUEST: (row) => {
        arrived[request[row]] = row;
        this._begin(request[row], PHASE.queued, row);
      },
      HIT: admit,
      MISS: admit,
      LOAD_START: load(PHASE.prefill, PHASE.loading),
      LOAD: load(PHASE.loading, PHASE.prefill),
      ALLOC: (row) => {
        const each = owners.get(a[row]);
        if (each === undefined || doing(each) !== PHASE.prefill) return;
        if (b[row] >= length(each) && times[row] > since(each)) computed(each, row);
      },
      COMMIT: (row) => {
        const each = owners.get(a[row]);
        if (each === undefined) return;
        // Of cache groups a row names the blocks from position b on, in one of them.
        depths.set(a[row], header.cache_groups ? Math.max(depths.get(a[row]), playback.step(e[row]) * (b[row] + c[row])) : depths.get(a[row]) + c[row]);
        if (words.committed[d[row]] === "shared" || doing(each) !== PHASE.prefill) return;
        const known = this.chunks.request.at(-1) === each && times[this.chunks.row.at(-1)] === times[row];
        if (times[row] > since(each) && !(header.cache_groups && known)) {
          this.chunks.request.push(each);
          this.chunks.row.push(row);
        }
        if (depths.get(a[row]) >= shareable(each)) computed(each, row);
      },
      EVICT: (row) => {
        evictions.row.push(row);
        evictions.blocks.push((evicted += playback.blocksOf(row)));
      },
      FIRST_TOKEN: (row) => {
        first[request[row]] = row;
        answered.add(request[row]);
        this._begin(request[row], PHASE.decode, row);
      },
      PREEMPT: (row) => {
        const each = request[row];
        if (doing(each) !== PHASE.preempted) before.set(each, doing(each));
        this._begin(each, PHASE.preempted, row, c[row]);
      },
      RESUME: (row) => this._begin(request[row], before.get(request[row]) ?? PHASE.decode, row),
      FINISH: (row) => {
        finished[request[row]] = row;
        this._begin(request[row], -1, row);
      },
      REJECT: (row) => {
        this.rejected[request[row]] = row;
        this._begin(request[row], -1, row);
      },
      FORK: (row) => {
        const each = owners.get(a[row]);
        if (each === undefined) return;
        owners.set(b[row], each);
        depths.set(b[row], depths.get(a[row]));
        open[each] += 1;
      },
      FREE: (row) => {
        const each = owners.get(a[row]);
        if (each === undefined || words.freed[b[row]] !== "close") return;
        owners.delete(a[row]);
        depths.delete(a[row]);
        open[each] -= 1;
        // Without a clock a request is finished when it is closed.
        if (!untimed || open[each] || doing(each) < 0 || doing(each) === PHASE.preempted) return;
        finished[each] = row;
        this._begin(each, -1, row);
      },
    };
    const unstepped = new Set(["REQUEST", "REJECT", "PREFETCH", "OFFLOAD", "LOAD", "DROP", "END"].map((name) => kinds[name]));
    const byKind = words.kinds.map((name) => does[name] ?? null);
    this._begun(owners, open, depths, answered);
    for (let row = 0; row < playback.length; row++) {
      if (returned.length && !unstepped.has(kind[row])) {
        returned = returned.filter((each) => {
          if (doing(each) !== PHASE.prefill) return false;
          if (since(each) >= times[row]) return true;
          computed(each, row);
          return false;
        });
      }
      byKind[kind[row]]?.(row);
    }
  }

  /** Find from when to when each request is there, and its lanes: from its arrival, and from its admission. */
  _lanes() {
    const { request, start, end } = this.phases;
    const rows = () => new Int32Array(this.arrived.length).fill(-1);
    [this.begins, this.ended] = [rows(), rows()];
    this.born = []; // requests in the order in which they begin
    request.forEach((each, phase) => {
      if (this.begins[each] < 0) {
        this.begins[each] = start[phase];
        this.born.push(each);
      }
      this.ended[each] = Math.max(this.ended[each], end[phase]);
    });
    const served = this.born.filter((each) => this.admitted[each] >= 0);
    // Without a clock requests follow one another: they would all be in one lane.
    if (this.untimed) this.lane = this.born.reduce((lane, each, rank) => lane.fill(rank, each, each + 1), rows());
    else this.lane = this._packed(this.born, this.begins);
    this.servedLane = this._packed(served.sort((left, right) => this.admitted[left] - this.admitted[right]), this.admitted);
  }

  /** Give each of some requests, which begin in this order, a lane in which no other is at that time. */
  _packed(some, begins) {
    const lane = new Int32Array(begins.length).fill(-1);
    const leaving = some.slice().sort((left, right) => this.ended[left] - this.ended[right]);
    const free = [];
    let [lanes, left] = [0, 0];
    for (const each of some) {
      while (left < leaving.length && this.ended[leaving[left]] < begins[each]) free.push(lane[leaving[left++]]);
      lane[each] = free.pop() ?? lanes++;
    }
    return lane;
  }
}

/** Return a function that lists the indices at which `keys`, below `count`, has a key. */
function groups(keys, count) {
  const first = new Int32Array(count + 1);
  for (const key of keys) first[key + 1] += 1;
  for (let key = 0; key < count; key++) first[key + 1] += first[key];
  const next = first.slice();
  const order = new Int32Array(keys.length);
  keys.forEach((key, index) => { order[next[key]++] = index; });
  return (key) => order.subarray(first[key], first[key + 1]);
}
