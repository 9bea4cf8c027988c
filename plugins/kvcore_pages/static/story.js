// The cost of evictions: the next requests for the blocks, and whether the optimum would have had them.
//
//   EVICT ──► its blocks ──► the next request that looks them up ──► hit, or missed:
//   `policy`, if the optimum hits them there, `capacity`, if it does not either; `dead`: there is none

/** Every eviction of a trace with its cost. A block that is evicted is charged to the first request that misses it. */
class Costs {
  constructor(side) {
    const { playback, contents } = side;
    this.side = side;
    this.sums = { evicted: 0, dead: 0, hit: 0, capacity: 0, policy: 0 };
    this.rows = side.evictions;
    this.lost = this.rows.map((row) => {
      let policy = 0;
      for (const part of this.parts(row)) {
        for (const name of ["dead", "hit", "capacity", "policy"]) this.sums[name] += part[name];
        policy += part.policy;
        this.sums.evicted += part.end - part.first;
      }
      return policy;
    }); // blocks of each that the optimum would have hit
    const best = this.lost.reduce((most, lost, at) => (lost > (this.lost[most] ?? 0) ? at : most), -1);
    this.costliest = this.rows[best] ?? -1;
    this.most = this.lost[best] ?? 0;
    [this.idle, this.left] = this._idle();
    const { hits, lookups } = contents.totals;
    const ofOptimum = contents.order.reduce((sum, request) => sum + playback.requests.optimum[request], 0);
    this.ratio = lookups ? hits / lookups : null;
    this.optimum = lookups ? ofOptimum / lookups : null;
  }

  /**
   * Return the share of the cached blocks, by time since the first row, that no request asked for before their eviction,
   * and the number of blocks that are cached in the end, which that leaves out. O(rows).
   */
  _idle() {
    const { about, times, columns, kinds, words } = this.side.playback;
    const { kind, c, d, age } = columns;
    const kept = ["new", "grown"].map((how) => words.committed.indexOf(how));
    let [cached, all, idle] = [Series.begun(about).cached, 0, 0]; // the last two in ns of a block
    for (let row = 0; row < times.length; row++) {
      if (row) all += cached * (times[row] - times[row - 1]);
      if (kind[row] === kinds.COMMIT && kept.includes(d[row])) cached += c[row];
      if (kind[row] !== kinds.EVICT) continue;
      cached -= this.side.playback.blocksOf(row);
      for (const { dead } of this.parts(row)) idle += dead * Math.min(age[row], times[row] - times[0]);
    }
    return [all ? idle / all : 0, cached];
  }

  /** Yield the blocks that the EVICT at `row` took, in pieces: positions, next request, and how many are what. */
  *parts(row) {
    const { playback, contents } = this.side;
    const { d, e } = playback.columns;
    const { hit, optimum } = playback.requests;
    for (const { owner, first, end, next } of contents.uses(d[row], e[row] - playback.blocksOf(row), e[row], row)) {
      const part = { owner, first, end, next, dead: 0, hit: 0, capacity: 0, policy: 0 };
      if (next < 0) part.dead = end - first;
      else {
        part.hit = Math.max(0, Math.min(end, hit[next]) - first);
        part.policy = Math.max(0, Math.min(end, optimum[next]) - Math.max(first, hit[next]));
        part.capacity = end - first - part.hit - part.policy;
      }
      yield part;
    }
  }

  /** Return the last EVICT row that is not after `row`; -1: none. */
  before(row) {
    return this.rows[countUpTo(this.rows, row) - 1] ?? -1;
  }

  /** Return the EVICT rows that cost most, the worst of each of `parts` equal spans of time, in order. */
  worst(parts) {
    const { times } = this.side.playback;
    const begin = times[this.rows[0]];
    const width = (times[this.rows.at(-1)] - begin + 1) / parts;
    const found = new Array(parts).fill(-1);
    this.rows.forEach((row, number) => {
      const part = Math.floor((times[row] - begin) / width);
      if (this.lost[number] > (this.lost[found[part]] ?? 0)) found[part] = number;
    });
    return found.filter((number) => number >= 0).map((number) => this.rows[number]);
  }

  /** Return the least time (ns) to compute the blocks `[first, end)` of a prompt. */
  prefill(first, end) {
    const { header, about } = this.side.playback;
    const [from, upto] = [first * header.block_size, end * header.block_size];
    const pairs = (tokens, window) => {
      const growing = Math.min(tokens, window ?? tokens);
      return (growing * (growing + 1)) / 2 + (tokens - growing) * growing;
    };
    const attention = about.prefill.pairs.reduce(
      (sum, [window, each]) => sum + each * (pairs(upto, window) - pairs(from, window)), 0);
    return NS.s * (about.prefill.token * (upto - from) + attention);
  }
}

/** Return whether a span can be evicted now: no sequence holds it, and it ends a prompt. */
const isEvictable = (span) => !span.pins && !span.children.size;

/** The cached blocks by their next use: there is none, the optimum has them then too, or it has not. */
function outlook(side) {
  const { cache, row, contents, playback } = side;
  const found = { dead: 0, held: 0, late: 0, spans: [] };
  for (const span of cache.spans.values()) {
    let dead = 0;
    for (const { first, end, next } of contents.uses(span.request, span.start, span.end, row)) {
      if (next < 0) dead += end - first;
      else {
        const held = Math.max(0, Math.min(end, playback.requests.optimum[next]) - first);
        found.held += held;
        found.late += end - first - held;
      }
    }
    found.dead += dead;
    found.spans.push({ span, dead });
  }
  return found;
}

/** The cost of evictions: over the whole trace, at this time, and the costliest ones. */
class StoryPanel {
  constructor(app, side) {
    Object.assign(this, { app, side });
    const { requests, header } = side.playback;
    this.policy = header.plugins.eviction?.name ?? "the policy";
    this.id = (request) => requests.id[request];
    this.now = element("div", { class: "now", id: `story-now-${side.number}` });
    this.bar = element("div", { class: "outlook", "aria-hidden": "true" });
    this.parts = element("ul", { class: "legend outlook-parts" });
    this.buttons = new Map();
    this.root = element(
      "section", { class: "panel story", "aria-label": `What evictions cost: ${side.name}` },
      element("header", {}, element("h2", {}, app.sides.length > 1 ? `What evictions cost: ${side.name}` : "What evictions cost")),
      this._whole(), element("h3", {}, "The pool now"), this.bar, this.parts, this.now, this._list(),
    );
  }

  /** Return the sentences about the whole trace. */
  _whole() {
    const { side, policy } = this;
    const { costs, contents } = side;
    if (!contents.complete) {
      return element("p", { class: "notice" }, "Too many requests share prompts here to tell who wants which block again.");
    }
    const { sums } = costs;
    const clock = side.playback.header.mode === "untimed" ? "" :
      " This run had a clock; the optimum replays its requests one after another, in the order of their first admission.";
    const told = [
      `${policy} hit ${format.share(costs.ratio)} of the blocks that requests looked up. The optimum, which knows ` +
      `all requests to come, hits ${costs.ratio === costs.optimum ? "as much" : format.share(costs.optimum)} in a pool of this size.${clock}`,
    ];
    if (sums.evicted) {
      const again = (sums.evicted - sums.dead) / sums.evicted;
      told.push(
        `${policy} evicted ${format.counted(sums.evicted, "block")}. Later requests asked again for ${format.share(again)} of them: ` +
        `${format.count(sums.policy)} missed although the optimum would have had them, ` +
        `${format.count(sums.capacity)} that the optimum would not have had either. On average at least ${format.share(costs.idle)} of what was ` +
        "cached waited for nobody: no request asked for it again before it was evicted." +
        (costs.left ? ` That leaves out the ${format.counted(costs.left, "block")} that stayed to the end.` : ""));
    } else told.push(`${policy} evicted nothing.`);
    return told.map((text) => element("p", {}, text));
  }

  /** Return the list of costly evictions. */
  _list() {
    const { app, side, policy } = this;
    if (!side.contents.complete) return null;
    const worst = side.costs.rows.length ? side.costs.worst(StoryPanel.LISTED) : [];
    if (!worst.length) return element("p", {}, `No eviction of ${policy} cost a hit that the optimum has.`);
    const items = worst.map((row) => {
      const { blocks, first } = this._eviction(row);
      const button = rowButton(app, side, row, "go");
      this.buttons.set(row, button);
      return element("li", {}, button, element("span", {},
        `${format.counted(blocks, "block")} of request ${this.id(side.playback.columns.d[row])}; request ${this.id(first.next)} wanted ` +
        `${first.missed === blocks ? "them" : `${format.count(first.missed)} of them`} ${this._later(row, first.next)}`));
    });
    return element("details", { open: innerWidth >= StoryPanel.ROOMY },
      element("summary", {}, "Costliest evictions"),
      element("p", { class: "soft" }, "The worst of each tenth of the run. Press a time to go there."),
      element("ol", { class: "worst" }, items));
  }

  /** Return the blocks of an EVICT, and the requests that missed them: most by the optimum's measure first. */
  _eviction(row) {
    const missed = new Map();
    const sums = { dead: 0, hit: 0, capacity: 0, policy: 0 };
    for (const part of this.side.costs.parts(row)) {
      for (const name of Object.keys(sums)) sums[name] += part[name];
      if (!part.policy && !part.capacity) continue;
      const user = missed.get(part.next) ?? { next: part.next, missed: 0, policy: 0, prefill: 0 };
      missed.set(part.next, user);
      user.missed += part.policy + part.capacity;
      user.policy += part.policy;
      user.prefill += this.side.costs.prefill(part.end - part.policy - part.capacity, part.end);
    }
    const users = [...missed.values()].sort((a, b) => b.policy - a.policy || b.missed - a.missed);
    return { blocks: this.side.playback.blocksOf(row), sums, users, first: users[0] };
  }

  /** Return how much later than `row` a request is admitted: `3 s later, after 12 other requests`. */
  _later(row, next) {
    const { playback, contents } = this.side;
    const between = contents.rank[next] - contents.rankAt(row) - 1;
    const after = between > 0 ? `, after ${format.counted(between, "other request")}` : "";
    const wait = contents.requests.when[next] - playback.times[row];
    return `${wait ? `${format.duration(wait)} later` : "at the same time"}${after}`;
  }

  draw() {
    const { app, side } = this;
    if (!side.contents.complete) return;
    if (app.keeps(this)) return;
    const state = outlook(side);
    this._bar(state);
    const row = side.costs.before(side.row);
    this.now.replaceChildren(...this._told(row, state));
    for (const [at, button] of this.buttons) button.setAttribute("aria-pressed", String(at === side.row));
  }

  _bar({ dead, held, late }) {
    const { cache } = this.side;
    const parts = [
      ["grey", dead, "cached, and nobody asks for it again"],
      ["yellow", late, "asked for again, a miss of the optimum too"],
      ["blue", held, "asked for again, and the optimum has it too"],
      ["green", cache.private, "private to running requests"],
      ["faint", cache.free, "free"],
    ].filter(([, blocks]) => blocks);
    this.bar.replaceChildren(...parts.map(([colour, blocks]) =>
      element("i", { style: `${filled(colour)}; width: ${(100 * blocks) / cache.blocks}%` })));
    this.parts.replaceChildren(...parts.map(([colour, blocks, name]) =>
      element("li", {}, element("i", { style: filled(colour) }), element("b", {}, format.count(blocks)), ` ${name}`)));
  }

  /** Return paragraphs about the EVICT at `row`, and the pool after it. */
  _told(row, state) {
    this.now.classList.remove("lost");
    if (row < 0) return [element("p", {}, "Nothing has been evicted yet.")];
    const { sums, users } = this._eviction(row);
    const exact = row === this.side.row;
    const told = [[exact ? "Evicted" : "Evicted last", this._happened(row, exact)]];
    if (users.length) told.push(["Wanted again", this._wanted(row)]);
    if (sums.policy) {
      told.push(["The optimum", this._kept(row, exact && state)]);
      this.now.classList.add("lost");
    } else {
      told.push(["The optimum", users.length
        ? "It would not have had them then either: the pool was too small for what was wanted sooner."
        : sums.hit
          ? "When they were asked for again, they had been computed already: this eviction cost nothing."
          : "No later request asked for them: this eviction cost nothing."]);
      if (!users.length) told.at(-1)[0] = "Not missed";
    }
    const other = this._otherSide(row);
    if (other) told.push(other);
    return told.map(([what, text]) => element("p", {}, element("b", {}, `${what}. `), text));
  }

  _happened(row, exact) {
    const { side, policy } = this;
    const { playback } = side;
    const { request, c, d, age } = playback.columns;
    const at = `At ${format.moment(playback.times[row])}`;
    const what = `${format.counted(playback.blocksOf(row), "block")} of request ${this.id(d[row])}`;
    const idle = format.duration(age[row]);
    if (c[row]) return `${at} ${what} ${c[row] === 1 ? "had expired and left" : "were lost by the engine"}, ${idle} after they were stored or hit last.`;
    return `${at} ${policy} evicted ${what} to make room for request ${this.id(request[row])}. They had been stored or hit last ` +
      `${idle} before.${exact ? this._rank(row) : ""}`;
  }

  _wanted(row) {
    const { playback } = this.side;
    const { blocks, users, first } = this._eviction(row);
    const tokens = format.counted(first.missed * playback.header.block_size, "token");
    const { model, device } = playback.about.prefill;
    const others = users.length > 1 ? ` ${format.counted(users.length - 1, "other request")} missed other blocks of it.` : "";
    const computed = playback.header.tiers?.length ? "missed them in the pool" : "had to compute them again";
    return `Request ${this.id(first.next)} wanted ${first.missed === blocks ? "them" : `${format.count(first.missed)} of them`} ` +
      `${this._later(row, first.next)}, and ${computed}: ${tokens}, at least ${format.duration(first.prefill)} of prefill ` +
      `(${model} on ${device}).${others}`;
  }

  _kept(row, state) {
    const { blocks, sums } = this._eviction(row);
    const kept = sums.policy === blocks ? "them" : `${format.count(sums.policy)} of them`;
    return `It knew that they would be asked for, and kept ${kept}.${state ? this._instead(row, state) : ""}`;
  }

  /** Return the sentence about how long other blocks had been unused. */
  _rank(row) {
    const { playback, cache } = this.side;
    const last = playback.times[row] - playback.columns.age[row];
    let older = 0;
    for (const span of cache.spans.values()) if (isEvictable(span) && span.last < last) older += span.ids.length;
    if (older) return ` It could have taken ${format.counted(older, "cached block")} that had been unused for longer.`;
    const all = this.policy === "lru" ? ", and that is all lru looks at" : "";
    return ` Nothing that it could have taken had been unused for longer${all}.`;
  }

  /** Return the sentence about blocks that could have been evicted at no cost. */
  _instead(row, { dead, spans }) {
    const { playback, cache } = this.side;
    if (!dead) return "";
    let best = null; // whole spans at the end of a prompt can go at once
    for (const each of spans) {
      if (each.dead === each.span.ids.length && isEvictable(each.span) && each.dead > (best?.ids.length ?? 0)) best = each.span;
    }
    const such = best
      ? `, such as ${format.counted(best.ids.length, "block")} of request ${this.id(best.request)}, used last ` +
        `${format.duration(playback.times[row] - best.last)} before`
      : "";
    return ` Of the ${format.counted(cache.cached, "block")} that stayed in this pool, ${format.count(dead)} ` +
      `(${format.share(dead / cache.cached)}) were never asked for again${such}: to evict those would have cost nothing.`;
  }

  /** Return the other trace, and the sentence about its evictions for the same request; null if it has not that. */
  _otherSide(row) {
    const { app, side } = this;
    const other = app.sides.find((each) => each !== side);
    if (!other?.contents.complete) return null;
    const request = app.requestOn(other, { side, request: side.playback.columns.request[row] });
    if (request < 0) return null;
    const sums = { blocks: 0, policy: 0, dead: 0 };
    for (const at of other.evictionsFor(request)) {
      for (const part of other.costs.parts(at)) {
        sums.blocks += part.end - part.first;
        sums.policy += part.policy;
        sums.dead += part.dead;
      }
    }
    const room = `For request ${this.id(side.playback.columns.request[row])} it evicted`;
    if (!sums.blocks) return [other.name, `${room} nothing.`];
    const dead = sums.dead === sums.blocks ? "nobody asked for any of them again" : `nobody asked for ${format.count(sums.dead)} of them again`;
    const cost = sums.policy ? `, and ${format.count(sums.policy)} cost a hit that the optimum has` : "";
    return [other.name, `${room} ${format.counted(sums.blocks, "block")}: ${dead}${cost}.`];
  }
}
StoryPanel.LISTED = 10;
StoryPanel.ROOMY = 700; // pixels
