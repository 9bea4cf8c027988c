// The events around this time, in words.

/** Describes rows in words. */
class Teller {
  constructor(app, side) {
    Object.assign(this, { app, side, playback: side.playback });
    const { eviction, retention } = this.playback.header.plugins;
    this.policy = eviction?.name ?? "the eviction policy";
    this.retention = retention?.name ?? "the retention policy";
  }

  /** Return a button that chooses a request. */
  request(number) {
    const { app, side, playback } = this;
    return requestButton(app, side, number, playback.requests.id[number]);
  }

  /** Return the description of a row, as text and buttons. */
  says(row) {
    const event = this.playback.event(row);
    const { words, requests, times, header } = this.playback;
    const { kind, request, a, b, c, d, e, age } = event;
    const blocks = (count) => format.counted(count, "block");
    const range = (first, end) => (end - first > 1 ? `blocks ${format.count(first)}–${format.count(end - 1)}` : `block ${format.count(first)}`);
    const moved = () => this.playback.blocksOf(row);
    const tier = (number) => header.tiers[number].tier;
    const lives = Lives.of(this.side);
    const since = (number) => {
      const arrived = lives.arrived[number];
      return arrived >= 0 ? `, ${format.duration(times[row] - times[arrived])} after it arrived` : "";
    };
    const who = () => this.request(request);
    const grouped = header.cache_groups;
    const within = () => (grouped ? ` in ${groupName(header, e)}` : "");
    return {
      HEADER: () => [`the run begins, with a pool of ${blocks(header.blocks)}`],
      END: () => ["the trace ends"],
      REQUEST: () => ["request ", who(), ` arrives: ${format.counted(requests.tokens[request], "token")} of prompt, ${format.count(requests.output[request])} to generate`],
      PREFETCH: () => ["sequence opened ahead for request ", who(), ` to load from tiers; ${blocks(b)} of its prompt ${b === 1 ? "is" : "are"} cached`],
      HIT: () => ["request ", who(), ` is admitted: ${b === 1 ? "the first block of its prompt is" : `the first ${format.count(b)} blocks of its prompt are`} cached${d ? ", its own from before it was preempted" : ""}`],
      MISS: () => ["request ", who(), `: block ${format.count(b)} of its prompt ${{
        absent: "is not cached", partial: "is the last, which is always computed", expired: "was cached and has expired", "no keys": "has no key to look up",
      }[words.why[c]]}${d ? "; admitted again" : ""}`],
      SPLIT: () => [`span ${a} is cut at block ${format.count(c)}: what is before is span ${b} now`],
      ALLOC: () => [`${blocks(moved())} ${grouped ? `of ${groupName(header, c)}, ` : ""}for request `, who(), ` from the pool, from position ${format.count(b)} on`],
      COMMIT: () => [`${blocks(c)} of request `, who(), grouped ? ` computed, and kept in ${groupName(header, e)}${words.committed[d] === "copy" ? ", as a copy" : ""}` : {
        new: ` computed, and can be shared: span ${b}`, grown: ` computed, and can be shared: span ${b} grows`,
        same: " are what another request has stored meanwhile: it uses those", shared: " were stored by its fork",
      }[words.committed[d]]],
      EVICT: () => grouped ? [`${blocks(moved())} of ${groupName(header, a)}, by ${this.policy} for request `, who()] : [
        `${blocks(moved())} of request `, this.request(d), ` (${range(e - moved(), e)}) `,
        ...(c === 1 ? ["had expired"] : c === 2 ? ["were lost by the engine"] :
          [c ? `with what the pool of ${words.pools[c - 3]}s had of them, for request ` : `by ${this.policy} for request `, who()]),
        `; stored or hit last ${format.duration(age)} before, ${format.counted(b, "hit")}`,
        this.side.differs(row) ? `; ${this.side.differs(row) === moved() ? "" : `${format.count(this.side.differs(row))} of them `}only here` : "",
      ],
      KEEP: () => ["request ", who(), ` shares what it has at its last chunk's end: ${[
        b ? `the windows of ${format.counted(b, "span")}` : "", c >= 0 ? `the state at the end of span ${c}` : "",
      ].filter(Boolean).join(", ") || "nothing new"}`],
      TOMBSTONE: () => [`span ${a} loses its ${words.pools[b]} for request `, who(), ": full attention keeps it"],
      FORGET: () => ["request ", who(), ` drops ${range(b, b + c)} by ${this.retention}`],
      COMPACT: () => ["request ", who(), ` keeps ${format.counted(b, "token")} of ${format.count(c)}, by ${this.retention}`],
      FREE: () => [words.freed[b] === "close" ? "sequence of request " : "request ", who(), {
        passed: grouped ? ` needs no more of its first blocks in ${groupName(header, Math.max(c, 0))}; ${blocks(moved())} of its own ${moved() === 1 ? "is" : "are"} free`
          : " frees window slots that the window has passed",
        close: ` is closed; ${blocks(moved())} of its own ${moved() === 1 ? "is" : "are"} free`,
        duplicate: ` frees ${blocks(moved())} that are cached already`, rollback: ` drops its newest tokens: ${blocks(moved())} ${moved() === 1 ? "is" : "are"} free`,
      }[words.freed[b]]],
      FORK: () => ["request ", who(), `: sequence ${a} has a fork, sequence ${b}`],
      COPY: () => ["request ", who(), ` copies its last block, ${format.count(b)}, before it writes there: a fork has it too`],
      FIRST_TOKEN: () => ["request ", who(), ` has its first token${since(request)}`],
      PREEMPT: () => ["request ", who(), ` loses its place: ${{
        pause: "it keeps its blocks", recompute: "its blocks are given up, and computed again later", swap: "its blocks go to a tier",
      }[words.preempted[b]]}`, ...(c >= 0 ? ["; for request ", this.request(c)] : [])],
      RESUME: () => ["request ", who(), " runs again"],
      RECOVER: () => [`${range(b, b + c)} of `, who(), ` are in ${tier(a)} from an earlier run`],
      OFFLOAD: () => [`${range(b, b + c)} of request `, who(), `${within()} go${c > 1 ? "" : "es"} to ${tier(a)}${d >= 0 ? ` from ${tier(d)}` : ""}, within ${format.duration(age)}`],
      LOAD_START: () => ["request ", who(), ` waits for ${range(b, b + c)}${within()} from ${tier(a)}: ${format.duration(age)}`],
      LOAD: () => [`${c ? range(b, b + c) : "no block"} of request `, who(), `${within()} came from ${tier(a)}`],
      DROP: () => [`${range(b, b + c)} of request `, who(), `${within()} left ${tier(a)}: ${words.dropped[d]}`],
      KEYS: () => ["request ", who(), " shares blocks that it generated"],
      FINISH: () => ["request ", who(), ` is finished: ${format.counted(b, "token")}${since(request)}`],
      REJECT: () => ["request ", who(), " is turned away"],
    }[kind]();
  }
}

/** Return a button that chooses a request. */
function requestButton(app, side, request, text) {
  return element("button", {
    type: "button", class: "ref", title: "Choose this request", onclick: () => app.choose({ side, request }),
  }, text);
}

/** Return a button that goes to a row of a side; without another text it has the time. */
function rowButton(app, side, row, look, ...text) {
  const told = text.length ? text : [format.moment(side.playback.times[row])];
  return element("button", { type: "button", class: look, title: "Go to this time", onclick: () => app.visit(side, row) }, told);
}

/** Filters of the log: by kinds of rows, or by the chosen request. */
const FILTERS = {
  all: { title: "all events", noun: "event" },
  evictions: { title: "evictions", noun: "eviction", kinds: ["EVICT", "TOMBSTONE"] },
  admissions: { title: "admissions", noun: "admission", kinds: ["HIT", "MISS", "PREFETCH", "REJECT"] },
  misses: { title: "misses", noun: "miss", kinds: ["MISS"] },
  preemptions: { title: "preemptions", noun: "preemption", kinds: ["PREEMPT", "RESUME"] },
  finishes: { title: "first tokens and ends", noun: "first token or end", kinds: ["FIRST_TOKEN", "FINISH"] },
  tiers: { title: "tiers", noun: "transfer", kinds: ["OFFLOAD", "LOAD_START", "LOAD", "DROP", "PREFETCH"] },
  chosen: { title: "of the chosen request", noun: "event of it", chosen: true },
};

/** The events around this time, in words. */
class LogPanel {
  constructor(app, side) {
    Object.assign(this, { app, side, teller: new Teller(app, side), filter: "all", drawn: "" });
    const { playback } = side;
    const name = app.titled("Events", side);
    const offered = Object.entries(FILTERS).filter(([key]) => key !== "tiers" || playback.header.tiers?.length);
    this.select = element("select", { "aria-label": "Which events", onchange: () => {
      this.filter = this.select.value;
      app.changed();
    } }, offered.map(([value, { title }]) => element("option", { value }, title)));
    const button = (by) => element("button", { type: "button", onclick: () => this._go(by) });
    [this.back, this.on] = [button(-1), button(1)];
    this.list = element("ol", { class: "log", id: `log-${side.number}`, tabindex: 0, "aria-label": name });
    this.root = element("section", { class: "panel log-panel", "aria-label": name },
      element("header", {}, element("h2", {}, name), element("label", {}, "show ", this.select),
        element("span", { class: "buttons" }, this.back, this.on)), this.list);
  }

  /** Return a predicate of the rows to show. */
  _wanted() {
    const { kinds, chosen } = FILTERS[this.filter];
    const { columns, kinds: numbers } = this.side.playback;
    if (!chosen) {
      const wanted = kinds && new Set(kinds.map((name) => numbers[name]));
      return (row) => !wanted || wanted.has(columns.kind[row]);
    }
    const request = this.app.requestOn(this.side, this.app.chosen);
    const takes = (row) => columns.kind[row] === numbers.EVICT && columns.d[row] === request && !this.side.playback.header.cache_groups;
    return (row) => request >= 0 && (columns.request[row] === request || takes(row));
  }

  /** Yield rows that are to be shown, from `row` on or back. */
  *_rows(row, by) {
    const wanted = this._wanted();
    for (let at = row; at >= 0 && at < this.side.playback.length; at += by) if (wanted(at)) yield at;
  }

  _some(row, by, most) {
    const found = [];
    for (const at of this._rows(row, by)) {
      found.push(at);
      if (found.length >= most) break;
    }
    return found;
  }

  _go(by) {
    const [row] = this._some(Math.max(0, this.side.row) + by, by, 1);
    if (row !== undefined) this.app.visit(this.side, row);
  }

  draw() {
    const { app, side } = this;
    if (app.keeps(this)) return;
    const row = Math.max(0, side.row);
    const state = [row, this.filter, FILTERS[this.filter].chosen && app.requestOn(side, app.chosen)].join();
    if (state === this.drawn) return;
    this.drawn = state;
    const { noun, chosen } = FILTERS[this.filter];
    this.back.textContent = `Previous ${noun}`;
    this.on.textContent = `Next ${noun}`;
    const before = this._some(row, -1, LogPanel.BEFORE).reverse();
    const after = this._some(row + 1, 1, LogPanel.LINES - before.length);
    this.back.disabled = !this._some(row - 1, -1, 1).length;
    this.on.disabled = !after.length;
    const rows = [...before, ...after];
    // The one that has happened last, if the row itself is not shown.
    const current = before.at(-1) ?? -1;
    this.list.replaceChildren(...rows.map((each) => this._line(each, each === current)));
    if (!rows.length) {
      this.list.append(element("li", { class: "soft" }, chosen && !app.chosen ? "No request is chosen." : `There is no ${noun}.`));
    }
    const marked = this.list.querySelector("[aria-current]");
    if (marked) this.list.scrollTop = marked.offsetTop - this.list.clientHeight / 2;
  }

  _line(row, current) {
    const { app, side } = this;
    const { playback } = side;
    const line = (playback.about.first ?? 0) + row + 1;
    const kind = playback.event(row).kind;
    return element("li", { "aria-current": current && "true", "data-row": row },
      rowButton(app, side, row, "ref go", `${format.count(line)} `, element("span", { class: "soft" }, format.moment(playback.times[row]))),
      element("code", {}, kind === "FORGET" ? "EVICT" : kind), element("span", {}, this.teller.says(row)));
  }
}
LogPanel.LINES = 40;
LogPanel.BEFORE = 16;
