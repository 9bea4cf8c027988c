// The holder of each block of a pool, the colour in which it is shown, and its life.
//
//   Cache ──► Holdings: spans in tree order, ──► Colouring: a class ──► pool.js, tree.js
//             then private blocks                for each block
//                                    └─────────► Life: sentences about one block

/** Return a colour between two of the theme; `part` of it is the second. */
function mixColours(one, two, part) {
  const [from, to] = [one, two].map(theme.colour);
  const channel = (at) => {
    const [low, high] = [from, to].map((hex) => parseInt(hex.slice(at, at + 2), 16));
    return Math.round(low + (high - low) * part).toString(16).padStart(2, "0");
  };
  return `#${[1, 3, 5].map(channel).join("")}`;
}

/** Yield spans from the roots down, each before its continuations. */
function* treeOrder(roots) {
  const waiting = [...roots].reverse();
  while (waiting.length) {
    const span = waiting.pop();
    yield span;
    waiting.push(...[...span.children].reverse());
  }
}

/** Blocks that one has: a span, or the private ones of a sequence. */
class Holder {
  constructor(request, start, ids, { span = null, seq = null }) {
    Object.assign(this, { request, start, ids, span, seq });
    this.step = span ? span.step : 1;
  }

  /** The position after its last block. */
  get end() {
    return this.start + this.step * this.ids.length;
  }

  /** Return where in `ids` the block at a position is. */
  indexOf(position) {
    return Math.round((position - this.start) / this.step);
  }

  /** How many sequences use it. */
  get uses() {
    return this.span ? this.span.pins : 1;
  }

  /** The position after its last block whose content has a name; `start` if none has. */
  named(requests) {
    if (this.span) return this.span.end;
    if (!this.seq || this.seq.forgot) return this.start;
    return Math.max(this.start, Math.min(this.end, requests.blocks[this.request]));
  }
}

/** The holder of each block of a side's pool at its row. O(blocks). */
class Holdings {
  constructor(side) {
    const { cache, playback } = side;
    this.holders = [];
    this.of = new Int32Array(cache.blocks).fill(-1); // by block: which holder; -1: it is free
    this.at = new Int32Array(cache.blocks); // by block: where in the holder
    for (const span of treeOrder(cache.roots)) this._add(new Holder(span.request, span.start, span.ids, { span }));
    for (const seq of cache.sequences.values()) {
      if (seq.ids.length) this._add(new Holder(seq.request, seq.span ? seq.span.end : 0, seq.ids, { seq }));
    }
    // Those that a sequence has no more, since others have the same, are freed by the next line.
    const left = cache.duplicates;
    if (left.length) this._add(new Holder(playback.columns.request[side.row], 0, left, {}));
    this._orders = {};
  }

  _add(holder) {
    const number = this.holders.push(holder) - 1;
    holder.ids.forEach((id, at) => {
      if (this.of[id] >= 0) return; // of a sequence that it was forked from
      this.of[id] = number;
      this.at[id] = at;
    });
  }

  /** Return the holder of a block; null if it is free. */
  holder(id) {
    return this.holders[this.of[id]] ?? null;
  }

  /** Return all blocks in an order of `ORDERS`. */
  order(name) {
    this._orders[name] ??= this[`_${name}`]();
    return this._orders[name];
  }

  _id() {
    return Int32Array.from(this.of, (_, id) => id);
  }

  _holder(holders = this.holders) {
    const order = new Int32Array(this.of.length);
    const numbers = new Map(this.holders.map((holder, number) => [holder, number]));
    let end = 0;
    for (const holder of holders) {
      for (const id of holder.ids) if (this.of[id] === numbers.get(holder)) order[end++] = id;
    }
    for (let id = 0; id < order.length; id++) if (this.of[id] < 0) order[end++] = id;
    return order;
  }

  _use() {
    const last = ({ span, uses }) => (uses ? Infinity : span.last);
    const sorted = [...this.holders].sort((one, two) => {
      const [first, second] = [last(one), last(two)];
      return first === second ? 0 : second - first;
    });
    return this._holder(sorted);
  }
}

const ORDERS = { id: "by block number", holder: "by place in the tree", use: "by last use, oldest last" };

/** Ends of classes of times, in seconds: those that fit a trace. */
function timeSteps(app, most) {
  const whole = (app.end - app.begin) / NS.s;
  return [0.001, 0.01, 0.1, 1, 10, 60, 600, 3600, 21600, 86400].filter((step) => step < whole).slice(-most);
}

/** Return words for the classes between steps: `1 s to 10 s`. */
function stepNames(steps) {
  const name = (step) =>
    step < 1 ? `${step * 1000} ms` : step < 60 ? `${step} s` : step < 3600 ? `${step / 60} min` : `${step / 3600} h`;
  const names = steps.map((step, at) => (at ? `${name(steps[at - 1])} to ${name(step)}` : `under ${name(step)}`));
  return [...names, steps.length ? `over ${name(steps.at(-1))}` : "any time"];
}

/** A class of blocks in the legend. */
const blockClass = (label, colour) => ({ label, colour });

const RANKED = ["blue", "orange", "green", "pink", "yellow", "sky"];

/** Colours for the groups that have most blocks; a group keeps its colour while it is one of them. */
class Ranks {
  constructor() {
    this.colours = new Map();
  }

  /** Return the keys with most blocks, by their colours. */
  assign(totals) {
    const top = [...totals].sort((one, two) => two[1] - one[1]).slice(0, RANKED.length).map(([key]) => key);
    for (const key of this.colours.keys()) if (!top.includes(key)) this.colours.delete(key);
    const used = new Set(this.colours.values());
    const spare = RANKED.filter((colour) => !used.has(colour));
    for (const key of top) if (!this.colours.has(key)) this.colours.set(key, spare.shift());
    return this.colours;
  }
}

/** Return classes for groups of holders: those with most blocks by name, the others by turns in two greys. */
function rankedMode(ranks, sides, groupsOf) {
  const groups = sides.map(groupsOf);
  const totals = new Map();
  const names = new Map();
  for (const each of groups) {
    for (const [{ ids }, { key, name }] of each) {
      totals.set(key, (totals.get(key) ?? 0) + ids.length);
      names.set(key, name);
    }
  }
  const colours = [...ranks.assign(totals)];
  const numbers = new Map(colours.map(([key], number) => [key, number + 1]));
  let turn = 0;
  for (const key of totals.keys()) if (!numbers.has(key)) numbers.set(key, colours.length + 1 + (turn++ % 2));
  const others = totals.size - colours.length;
  return {
    classes: [
      ...colours.map(([key, colour]) => blockClass(names.get(key), theme.colour(colour))),
      ...(others > 0 ? [blockClass(`${format.counted(others, "other")}, one`, mixColours("grey", "panel", 0.15)),
        blockClass("and the next", mixColours("grey", "panel", 0.5))] : []),
    ],
    classify: (side, holder) => [[holder.ids.length, numbers.get(groups[sides.indexOf(side)].get(holder).key)]],
  };
}

const whole = (holder, number) => [[holder.ids.length, number]];

/** How blocks can be coloured: `make` returns the classes after `free`, and pieces `[end, class]` of a holder. */
const MODES = {
  state: {
    title: "state",
    make: () => ({
      classes: [
        blockClass("private", theme.colour("pink")),
        blockClass("cached, not in use", theme.colour("sky")),
        blockClass("cached, in use by 1", theme.colour("blue")),
        blockClass("shared by 2", theme.colour("green")),
        blockClass("by 3 to 7", theme.colour("yellow")),
        blockClass("by 8 or more", theme.colour("orange")),
      ],
      classify: (_, holder) =>
        whole(holder, !holder.span ? 1 : holder.uses < 3 ? 2 + holder.uses : holder.uses < 8 ? 5 : 6),
    }),
  },
  request: {
    title: "request that brought it",
    make: ({ app, colouring }) => rankedMode(colouring.ranks.request, app.sides, (side) => {
      const { id } = side.playback.requests;
      const group = (request) => ({ key: id[request], name: `request ${shortened(id[request])}` });
      return new Map(colouring.holdings(side).holders.map((holder) => [holder, group(holder.request)]));
    }),
  },
  prefix: {
    title: "common prefix",
    make: ({ app, colouring }) => rankedMode(colouring.ranks.prefix, app.sides, (side) =>
      prefixGroups(side, colouring.holdings(side))),
  },
  age: {
    title: "time since last use",
    make({ app }) {
      const steps = timeSteps(app, 4);
      const names = stepNames(steps);
      return {
        classes: [
          blockClass("in use", theme.colour("green")),
          ...names.map((name, at) => blockClass(name, mixColours("blue", "panel", (0.9 * at) / names.length))),
        ],
        classify(side, holder) {
          if (holder.uses) return whole(holder, 1);
          const age = (side.playback.now - holder.span.last) / NS.s;
          return whole(holder, 2 + steps.filter((step) => age >= step).length);
        },
      };
    },
  },
  next: {
    title: "next use",
    make({ app }) {
      const steps = timeSteps(app, 3);
      const names = stepNames(steps);
      const never = names.length + 2;
      return {
        classes: [
          ...names.map((name, at) =>
            blockClass(at ? name : `asked for in ${name}`, mixColours("blue", "panel", (0.9 * at) / names.length))),
          blockClass("asked for again, a miss of the optimum too", theme.colour("yellow")),
          blockClass("never asked for again", mixColours("grey", "panel", 0.5)),
        ],
        classify(side, holder) {
          const { contents, playback } = side;
          const { requests, now, row, times } = playback;
          const end = holder.named(requests);
          const pieces = [];
          const add = (upto, number) => pieces.push([holder.indexOf(upto), number]);
          for (const { end: upto, next } of contents.uses(holder.request, holder.start, end, row)) {
            if (next < 0) {
              add(upto, never);
              continue;
            }
            const wait = (playback.requests.when[next] - now) / NS.s;
            const kept = Math.min(upto, requests.optimum[next]);
            add(kept, 1 + steps.filter((step) => wait >= step).length);
            if (kept < upto) add(upto, never - 1);
          }
          if (end < holder.end) add(holder.end, never);
          return pieces;
        },
      };
    },
  },
  group: {
    title: "cache group",
    make({ app }) {
      const { header } = app.sides[0].playback;
      const palette = [...RANKED, "grey", "ink"];
      return {
        classes: header.cache_groups.groups.map((_, number) =>
          blockClass(groupName(header, number), theme.colour(palette[number % palette.length]))),
        classify: ({ cache }, { ids }) => ids.map((id, at) => [at + 1, 1 + cache.groupOf[id]]),
      };
    },
  },
  tier: {
    title: "tiers that have it too",
    make({ app }) {
      const tiers = app.sides[0].playback.header.tiers.map(({ tier }) => tier);
      const palette = ["sky", ...RANKED.filter((colour) => colour !== "sky"), "grey", "ink"];
      const masks = [...Array(2 ** tiers.length).keys()];
      const names = (mask) => tiers.filter((_, number) => mask & (1 << number)).map(shortened).join(" and ");
      return {
        classes: masks.map((mask) =>
          blockClass(mask ? `also in ${names(mask)}` : "in the pool only", theme.colour(palette[mask % palette.length]))),
        classify(side, holder) {
          const { contents, playback, cache } = side;
          const pieces = [];
          const end = holder.named(playback.requests);
          for (const [owner, first, high] of contents.pieces(holder.request, holder.start, end)) {
            const ends = cache.tiers.map((tier) => tier.ends.get(owner) ?? 0);
            const cuts = [...new Set([...ends.filter((each) => each > first && each < high), high])];
            for (const cut of cuts.sort((one, two) => one - two)) {
              const mask = ends.reduce((bits, each, number) => (each >= cut ? bits | (1 << number) : bits), 0);
              pieces.push([holder.indexOf(cut), 1 + mask]);
            }
          }
          if (end < holder.end) pieces.push([holder.ids.length, 1]);
          return pieces;
        },
      };
    },
  },
};

/** Return an id of the trace, cut to a length that fits a label. */
const shortened = (text) => (text.length > 16 ? `${text.slice(0, 15)}…` : text);

/** Return the group of each holder: prompts with a common beginning. A group with over a quarter of all is divided. */
function prefixGroups(side, { holders }) {
  const sizes = new Map();
  let total = 0;
  for (const { span, ids } of [...holders].reverse()) {
    total += ids.length;
    if (!span) continue;
    const size = (sizes.get(span) ?? 0) + ids.length;
    sizes.set(span, size);
    if (span.parent) sizes.set(span.parent, (sizes.get(span.parent) ?? 0) + size);
  }
  const { id } = side.playback.requests;
  const group = (request, start, end) => {
    const owner = id[side.contents.owner(request, start)];
    return { key: `${owner}:${start}`, name: `as request ${shortened(owner)} to block ${format.count(Math.ceil(end))}` };
  };
  const found = new Map();
  const spans = new Map();
  for (const holder of holders) {
    const { span, seq } = holder;
    const above = span ? span.parent : seq?.span;
    const apart = !above || (sizes.get(above) > total / 4 && spans.get(above)?.top === above);
    const made = apart
      ? { top: span, ...group(holder.request, holder.start, holder.end) }
      : spans.get(above);
    if (span) spans.set(span, made);
    found.set(holder, made);
  }
  return found;
}

/** In which colour each block is shown: the same way on all sides. */
class Colouring {
  constructor(app) {
    this.app = app;
    // Without a clock nothing stays in use: what is worth seeing is what each block is still good for.
    const untimed = app.sides.every(({ playback, costs }) => playback.header.mode === "untimed" && costs);
    [this.mode, this.order] = untimed ? ["next", "use"] : ["state", "id"];
    this.ranks = { request: new Ranks(), prefix: new Ranks() };
    this._holdings = new Map();
    this._views = new Map();
    this._made = null; // by the mode, for the states that `_views` are of
    this.outlines = false; // whether what only one side has is outlined
  }

  /** Return the colouring that all panels of a page share. */
  static of(app) {
    app.colouring ??= new Colouring(app);
    return app.colouring;
  }

  /** Return the modes that this page has. */
  modes() {
    const tiers = this.app.sides.map(({ playback }) => JSON.stringify(playback.header.tiers?.map(({ tier }) => tier)));
    const groups = this.app.sides.map(({ playback }) => JSON.stringify(playback.header.cache_groups?.groups));
    const alike = ([first, ...others]) => first && others.every((each) => each === first);
    const grouped = groups.some(Boolean);
    const judged = this.app.sides.every((side) => side.costs);
    return Object.keys(MODES).filter((name) =>
      (name !== "group" || alike(groups)) && (name !== "next" || judged) && (name !== "tier" || (!grouped && alike(tiers))));
  }

  /** Return the holders of a side's blocks now. */
  holdings(side) {
    let kept = this._holdings.get(side);
    // A cache goes on in place, and back as a copy: with the row, it tells the state.
    if (kept?.row !== side.row || kept.cache !== side.cache) {
      kept = { row: side.row, cache: side.cache, value: new Holdings(side) };
      this._holdings.set(side, kept);
      this._made = null;
    }
    return kept.value;
  }

  /** Return the classes of a side's blocks now: `classes` with counts, `of` by block, `pieces` by holder. */
  view(side) {
    const key = `${this.mode} ${theme.dark}`;
    for (const each of this.app.sides) this.holdings(each);
    if (!this._made || this._key !== key) {
      this._key = key;
      this._views.clear();
      this._made = MODES[this.mode].make({ app: this.app, colouring: this });
    }
    let view = this._views.get(side);
    if (!view) {
      view = this._view(side);
      this._views.set(side, view);
    }
    return view;
  }

  _view(side) {
    const holdings = this.holdings(side);
    const classes = [blockClass("free", null), ...this._made.classes].map((each) => ({ ...each, blocks: 0 }));
    const of = new Uint8Array(holdings.of.length);
    const marks = new Uint8Array(holdings.of.length);
    const pieces = holdings.holders.map((holder, number) => {
      const found = this._made.classify(side, holder);
      const mark = (holder.span ? 0 : PRIVATE) | (holder.span && holder.uses ? USED : 0);
      let at = 0;
      for (const [end, kind] of found) {
        for (; at < end; at++) {
          if (holdings.of[holder.ids[at]] !== number) continue;
          of[holder.ids[at]] = kind;
          marks[holder.ids[at]] = mark;
        }
      }
      return found;
    });
    for (const kind of of) classes[kind].blocks += 1;
    return { holdings, classes, of, marks, pieces };
  }

  /** Return whether each block of a side has a content that the other side has nowhere in its pool. */
  onlyHere(side) {
    const view = this.view(side);
    view.onlyHere ??= this._onlyHere(side);
    return view.onlyHere;
  }

  _onlyHere(side) {
    const other = this.app.sides.find((each) => each !== side);
    const pieces = (of, holder) =>
      [...of.piecesOn(other, holder.request, holder.start, holder.named(of.playback.requests), holder.span?.group)];
    const there = new Stretches(this.holdings(other).holders.flatMap((holder) => pieces(other, holder)));
    const flags = new Uint8Array(side.cache.blocks);
    for (const holder of this.holdings(side).holders) {
      const flag = (first, end, value) => {
        for (const id of holder.ids.slice(holder.indexOf(first), holder.indexOf(end))) flags[id] = value;
      };
      flag(holder.start, holder.named(side.playback.requests), 1);
      for (const piece of pieces(side, holder)) for (const [first, end] of there.parts(piece)) flag(first, end, 0);
    }
    return flags;
  }

  /** Return the blocks that are lit on a side: those of a request's prompt, and its private ones; null: none is lit. */
  lit(side) {
    const request = this.app.lit(side);
    if (request < 0) return null;
    const key = [side.row, request].join();
    if (side.litBlocks?.key !== key) side.litBlocks = { key, flags: litBlocks(side, request) };
    return side.litBlocks.flags;
  }
}

const [PRIVATE, USED] = [1, 2];

/** Return how many blocks from `start` to `end` two prompts have in common. */
function commonBlocks(contents, one, two, start, end) {
  const [ours, theirs] = [one, two].map((request) => contents.pieces(request, start, end));
  let upto = start;
  for (let at = 0; at < Math.min(ours.length, theirs.length) && ours[at][0] === theirs[at][0]; at++) {
    upto = Math.min(ours[at][2], theirs[at][2]);
    if (ours[at][2] !== theirs[at][2]) break;
  }
  return upto - start;
}

/** Return a flag by block: whether it is of the prompt of a request, as far as it is cached, or private to it. */
function litBlocks({ cache, contents, playback }, request) {
  const flags = new Uint8Array(cache.blocks);
  const light = (ids, count = ids.length) => {
    for (let at = 0; at < count; at++) flags[ids[at]] = 1;
  };
  const known = playback.requests.blocks[request];
  for (let level = cache.roots; level;) {
    let next = null;
    for (const span of level) {
      const count = commonBlocks(contents, span.request, request, span.start, Math.min(span.end, known));
      if (count <= 0) continue;
      light(span.ids, Math.round(count / span.step));
      if (span.group !== undefined) continue; // those of cache groups are all roots
      if (span.start + count === span.end) next = span.children;
      break;
    }
    level = next;
  }
  for (const seq of cache.sequences.values()) {
    if (seq.request !== request) continue;
    light(seq.ids);
    for (const span of Cache.path(seq.span)) light(span.ids);
  }
  return flags;
}

/** Sentences on one block at the time that is shown. */
class Life {
  constructor(app, side, id) {
    Object.assign(this, { app, side, id });
    this.holdings = Colouring.of(app).holdings(side);
    this.holder = this.holdings.holder(id);
    this.row = side.cache.taken[id];
    const { request, span, start, seq } = this.holder ?? {};
    this.request = request ?? -1; // to light up; -1: the block is free
    this.span = span ?? null;
    this.position = -1;
    this.step = side.cache.steps?.[side.cache.groupOf[id]] ?? 1; // that of the span it is in, or will be in
    if (span || (seq && !seq.forgot)) this.position = start + this.step * this.holdings.at[id];
    else if (this.holder) this.position = this._allocated();
  }

  /** Return sentences; with `fate` also on its future, which takes a few ms a million lines. */
  sentences(fate = true) {
    const { playback } = this.side;
    if (!this.holder) {
      const given = fate ? this._next(["ALLOC", "COPY"]) : -1;
      return [
        `Block ${format.count(this.id)}: free.`,
        given >= 0 && `Next given to ${this._name(playback.columns.request[given])} ${this._in(given)}.`,
      ].filter(Boolean);
    }
    return [
      `Block ${format.count(this.id)}: ${this._state()}.`, this._group(), this._content(), this._origin(), this._hits(),
      this._asked(), fate && this._fate(),
    ].filter(Boolean);
  }

  _name(request) {
    return `request ${shortened(this.side.playback.requests.id[request])}`;
  }

  /** Return when a later row is: `in 3.2 s, at 12.300 s`. */
  _in(row) {
    return this._at(this.side.playback.times[row]);
  }

  /** Return how far a moment is from now, and when that is. */
  _at(time) {
    return `in ${format.duration(time - this.side.playback.now)}, at ${format.moment(time)}`;
  }

  _state() {
    const { holder, side } = this;
    if (!holder.span) return `private to ${this._name(holder.request)}`;
    if (!holder.uses) return "cached, not in use";
    const users = [];
    for (const seq of side.cache.sequences.values()) {
      for (const span of Cache.path(seq.span)) if (span === holder.span) users.push(this._name(seq.request));
      if (users.length === 4) break;
    }
    // A sequence of cache groups holds no path of spans: who it is, is not known here.
    if (side.playback.header.cache_groups) return `cached, in use by ${format.counted(holder.uses, "sequence")}`;
    const more = holder.uses > users.length ? " and others" : "";
    return `cached, in use by ${format.counted(holder.uses, "sequence")}: ${users.join(", ")}${more}`;
  }

  _group() {
    const { cache, playback } = this.side;
    return cache.groupOf ? `Of ${groupName(playback.header, cache.groupOf[this.id])}.` : null;
  }

  _content() {
    const { playback } = this.side;
    const { position, request, step } = this;
    if (position < 0) return null;
    const size = playback.header.block_size;
    const [first, end] = [position, position + step].map((each) => Math.round(size * each));
    const generated = first >= playback.requests.tokens[request];
    const where = generated ? `of ${this._name(request)}, generated` : `of the prompt of ${this._name(request)}`;
    return `Block ${format.count(Math.round(position / step))} ${where} (tokens ${format.count(first)}–${format.count(end)}).`;
  }

  _origin() {
    const { playback } = this.side;
    const { span } = this;
    if (this.row < 0) return "Allocated before the window of this page.";
    const when = format.moment(playback.times[this.row]);
    const said = `Allocated for ${this._name(playback.columns.request[this.row])} at ${when}`;
    return span ? `${said}, cached at ${format.moment(span.stored)}.` : `${said}.`;
  }

  _hits() {
    const { span } = this;
    if (!span) return null;
    const ago = `${format.duration(this.side.playback.now - span.last)} ago`;
    if (!span.hits) return `Not hit yet; stored ${ago}.`;
    const last = span.hitters.slice(-3).reverse().map((request) => shortened(this.side.playback.requests.id[request]));
    return `Hit by ${format.counted(span.hits, "request")}, last by ${last.join(", ")}; last used ${ago}.`;
  }

  _asked() {
    const { contents, playback, row } = this.side;
    const { position, request } = this;
    if (!contents.complete || position < 0 || position >= playback.requests.blocks[request]) return null;
    const owner = contents.owner(request, position);
    const next = contents.nextUser(owner, position, row);
    if (next < 0) return "No later request asks for it.";
    const asked = `Asked for next by ${this._name(next)} ${this._at(playback.requests.when[next])}`;
    if (!this.side.costs) return `${asked}.`;
    const kept = contents.heldByOptimum(owner, position, row) ? "keeps it for that" : "does not keep it";
    return `${asked}; the optimum ${kept}.`;
  }

  _fate() {
    const { contents, playback } = this.side;
    const row = this._next(["EVICT", "FREE", "FORGET", "COMPACT"]);
    if (row < 0) return "It stays to the end of the trace.";
    const { kind, request, c } = playback.event(row);
    if (kind === "FREE") return `Freed ${this._in(row)}.`;
    if (kind !== "EVICT") return `Dropped by its sequence ${this._in(row)}.`;
    const by = c > 2 ? `for what ${playback.words.pools[c - 3]}s need` : `by ${playback.header.plugins.eviction.name}`;
    const said = c === 1 ? `Expired ${this._in(row)}` : c === 2 ? `Lost by the engine ${this._in(row)}`
      : `Evicted ${this._in(row)}, ${by} for ${this._name(request)}`;
    if (!contents.complete || this.position < 0) return `${said}.`;
    const owner = contents.owner(this.request, this.position);
    const next = contents.nextUser(owner, this.position, row);
    // A request that is admitted later than the eviction asks for it.
    if (next < 0) return `${said}; nobody asks for it after that.`;
    const wait = format.duration(playback.requests.when[next] - playback.times[row]);
    return `${said}; ${this._name(next)} asks for it ${wait} later.`;
  }

  /** Return the position that a private block had when it was allocated; -1 where that is not known. */
  _allocated() {
    const { kind, b } = this.side.playback.event(this.row);
    if (kind === "COPY") return b;
    return kind === "ALLOC" ? this.step * (b + this.side.playback.ids(this.row).indexOf(this.id)) : -1;
  }

  /** Return the next row of some kinds that names the block as taken or given away; -1: none. O(rows). */
  _next(names) {
    const { id, side: { playback } } = this;
    const { kind, d } = playback.columns;
    const wanted = new Uint8Array(playback.words.kinds.length);
    for (const name of names) wanted[playback.kinds[name]] = 1;
    for (let row = this.side.row + 1; row < playback.length; row++) {
      if (!wanted[kind[row]]) continue;
      // A COMPACT frees what comes after those that it takes.
      const from = kind[row] === playback.kinds.COMPACT ? d[row] : 0;
      if (playback.ids(row).indexOf(id, from) >= 0) return row;
    }
    return -1;
  }
}

/** The card beside the pointer, and its text for screen readers. */
const blockCard = {
  root: null,
  /** Show lines near a point of the window; `aloud`: they are also read. */
  show(lines, x, y, aloud = false) {
    if (!blockCard.root) {
      blockCard.root = element("div", { class: "panel card", id: "card", "aria-hidden": "true" });
      blockCard.live = element("p", { class: "hidden", id: "card-text", "aria-live": "polite" });
      document.body.append(blockCard.root, blockCard.live);
    }
    const { root, live } = blockCard;
    root.replaceChildren(...lines.map((line, at) => element(at ? "p" : "h3", {}, line)));
    root.hidden = false;
    const { width, height } = root.getBoundingClientRect();
    const [wide, high] = [document.documentElement.clientWidth, innerHeight];
    const left = x + 16 + width < wide ? x + 16 : x - 16 - width;
    root.style.left = `${Math.max(4, Math.min(left, wide - width - 4))}px`;
    root.style.top = `${y + 16 + height < high ? y + 16 : Math.max(4, y - 16 - height)}px`;
    const text = lines.join(" ");
    if (aloud && live.textContent !== text) live.textContent = text;
  },
  hide() {
    if (blockCard.root) blockCard.root.hidden = true;
  },
};

/** A panel of one side whose canvas shows blocks, with a card for the block at the pointer or the cursor. */
class BlockPanel {
  constructor(app, side, { name, kind, keys }) {
    Object.assign(this, { app, side, keys, pointer: null, colouring: Colouring.of(app) });
    this.name = app.titled(name, side);
    this.canvas = element("canvas", { tabindex: 0, role: "img", class: kind });
    this.note = element("p", { class: "soft note" });
    this._listen();
  }

  /** Listen to pointer and keys. A panel has `_move(event)`, `_step(key)` for its `keys`, and `_choose()`. */
  _listen() {
    const { canvas } = this;
    for (const name of ["pointermove", "pointerdown"]) canvas.addEventListener(name, (event) => this._move(event));
    for (const name of ["pointerleave", "blur"]) canvas.addEventListener(name, () => this._leave());
    canvas.addEventListener("focus", () => { if (canvas.matches(":focus-visible")) this._step(null); });
    canvas.addEventListener("click", () => { if (this.pointer) this._choose(); });
    canvas.addEventListener("keydown", (event) => {
      if (this.keys.test(event.key)) this._step(event.key);
      else if (event.key === "Enter") canvas.click();
      else if (event.key === "Escape") this._leave();
      else return;
      event.preventDefault();
      event.stopPropagation(); // arrows are also the clock's
    });
  }

  _leave() {
    if (!this.pointer) return;
    this.pointer = null;
    blockCard.hide();
    this.app.point(null);
  }
}

/** Fit a canvas to its width on the page and a height, as many pixels as the screen has; return its context. */
function fitCanvas(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const size = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

/** Hatch a rectangle: it holds private blocks. */
function hatch(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.beginPath();
  for (let at = -height; at < width; at += 5) {
    context.moveTo(x + at, y + height);
    context.lineTo(x + at + height, y);
  }
  context.stroke();
  context.restore();
}

/** The legend: classes with their blocks. */
class BlockLegend {
  constructor() {
    this.root = element("ul", { class: "legend blocks" });
    this.labels = "";
  }

  draw(view) {
    const shown = view.classes.filter(({ blocks }, number) => blocks || number === 0);
    const labels = shown.map(({ label, colour }) => `${label}${colour}`).join("\n");
    if (labels !== this.labels) {
      this.labels = labels;
      this.numbers = shown.map(() => element("b", {}));
      this.root.replaceChildren(...shown.map(({ label, colour }, at) =>
        element("li", { "data-class": label }, element("i", {
          class: { private: "hatched", free: "hollow" }[label] ?? (/in use by|shared|^by /.test(label) ? "dotted" : ""),
          style: colour ? `background-color:${colour}` : null,
        }), `${label} `, this.numbers[at])));
    }
    shown.forEach(({ blocks }, at) => { this.numbers[at].textContent = format.count(blocks); });
  }
}
