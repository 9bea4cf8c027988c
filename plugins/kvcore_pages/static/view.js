// The page of a trace, or of two: one clock, and panels that show the state at its time.

/** A trace on the page: its playback, and data derived from it. */
class Side {
  constructor(number, name, playback) {
    Object.assign(this, { number, name, playback });
    this.contents = new Contents(playback);
    this.byId = new Map(playback.requests.id.map((id, request) => [id, request]));
    this.evictions = []; // rows
    this.arrived = new Int32Array(playback.length); // how many requests had, at each row
    for (let row = 0, arrived = 0; row < playback.length; row++) {
      const kind = playback.columns.kind[row];
      if (kind === playback.kinds.REQUEST) arrived += 1;
      else if (kind === playback.kinds.EVICT) this.evictions.push(row);
      this.arrived[row] = arrived;
    }
    // Of cache groups and pools no optimum is known.
    const { cache_groups, layer_pools } = playback.header;
    if (this.contents.complete && !cache_groups && !layer_pools) this.costs = new Costs(this);
  }

  get cache() {
    return this.playback.cache;
  }

  /** Whether its evictions are compared with those of the other trace, as `find_differences` of view.py can. */
  get compared() {
    return this.playback.columns.differs !== undefined;
  }

  get row() {
    return this.playback.row;
  }

  /** Return the EVICT rows that made room for a request. */
  evictionsFor(request) {
    const { columns } = this.playback;
    return this.evictions.filter((row) => columns.request[row] === request);
  }

  /** Return the last row of this side that is not after `row` of `other`: by time, then by requests that arrived. */
  rowLike(other, row) {
    const { playback } = this;
    if (row < 0) return -1;
    const time = other.playback.times[row];
    const last = playback.rowAt(time);
    const before = firstIndex(playback.length, (each) => playback.times[each] >= time) - 1;
    const alike = firstIndex(playback.length, (each) => this.arrived[each] > other.arrived[row]) - 1;
    return Math.max(before, Math.min(last, alike));
  }

  /** Yield the blocks `[start, end)` of a request as pieces for `Stretches`, numbered as in `other`; none if it has no such request. */
  *piecesOn(other, request, start, end, group = 0) {
    const there = this === other ? request : other.byId.get(this.playback.requests.id[request]);
    if (there === undefined) return;
    for (const piece of other.contents.pieces(there, start, end)) yield [group, ...piece];
  }

  /** Yield spans that are cached, each with its pieces as in `other`. */
  *cachedOn(other) {
    for (const span of this.cache.spans.values()) yield [span, [...this.piecesOn(other, span.request, span.start, span.end, span.group)]];
  }

  /** Return the contents that are cached. O(spans). */
  get held() {
    return new Stretches([...this.cachedOn(this)].flatMap(([, pieces]) => pieces));
  }

  /** Return how many blocks of the eviction at `row` the other trace did not evict for the same request. */
  differs(row) {
    return this.playback.columns.differs?.[row] ?? 0;
  }
}

/** The clock, the chosen request, and the panels that are drawn again when either changes. */
class App {
  constructor(sides, about) {
    this.sides = sides;
    this.about = about;
    this.begin = Math.min(...sides.map((side) => side.playback.begin));
    this.end = Math.max(...sides.map((side) => side.playback.end));
    this.time = this.begin;
    this.playing = false;
    this.speed = 1; // ns of the trace in a ns
    this.chosen = null; // { side, request }: a click; the id of its request is looked up elsewhere
    this.pointed = null; // { side, request, block }: what is under the pointer, or has the focus
    this.panels = [];
    this.due = false;
  }

  /** Add a panel: it has `root`, an element, and `draw()`, which is called on each change. */
  add(panel) {
    this.panels.push(panel);
    return panel.root;
  }

  /** Return the title of a panel of a side. */
  titled(text, side) {
    return this.sides.length > 1 ? `${text} of ${side.name}` : text;
  }

  /** Draw all panels, once, before the next frame. */
  changed() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      for (const panel of this.panels) panel.draw();
    });
  }

  /** Go to a time (ns): each side to its last row that is not later. */
  seek(time) {
    this.time = Math.max(this.begin, Math.min(this.end, time));
    for (const { playback } of this.sides) playback.seek(playback.rowAt(this.time));
    this.changed();
  }

  /** Go to a row of a side, and the others to the same time. */
  seekRow(side, row) {
    this.time = side.playback.times[Math.max(0, row)];
    for (const other of this.sides) {
      other.playback.seek(other === side ? row : other.rowLike(side, row));
    }
    this.changed();
  }

  /** Return where in the run a time (ns) is, from 0 to 1. */
  part(time) {
    return (time - this.begin) / Math.max(1, this.end - this.begin);
  }

  /** Stop, and go to a part of the run, from 0 to 1. */
  visitPart(part) {
    this.play(false);
    this.seek(this.begin + part * (this.end - this.begin));
  }

  /** Stop, and go to a row of a side. */
  visit(side, row) {
    this.play(false);
    this.seekRow(side, row);
  }

  /** Return whether a panel is to keep its numbers: those that change with each frame cannot be read. */
  keeps(panel) {
    const now = performance.now();
    if (this.playing && now - (panel.drawnAt ?? -Infinity) < App.KEPT) return true;
    panel.drawnAt = now;
    return false;
  }

  /** Return less than 0 if `row` of a side comes before `otherRow` of another: by time, then by requests that arrived. */
  order(side, row, other, otherRow) {
    return side.playback.times[row] - other.playback.times[otherRow]
      || side.arrived[row] - other.arrived[otherRow] || side.number - other.number;
  }

  /** Go one row on: of two sides, the one whose next row is earlier. */
  stepForward() {
    const [side] = this.sides.filter((each) => each.row + 1 < each.playback.length)
      .sort((one, other) => this.order(one, one.row + 1, other, other.row + 1));
    if (!side) return;
    side.playback.seek(side.row + 1);
    this.time = side.playback.now;
    this.changed();
  }

  /** Go one row back: of two sides, the one whose row is later. */
  stepBack() {
    const side = this.sides.filter((each) => each.row >= 0)
      .sort((one, other) => this.order(one, one.row, other, other.row)).at(-1);
    if (!side) return;
    side.playback.seek(side.row - 1);
    this.time = side.row < 0 ? this.begin : side.playback.now;
    this.changed();
  }

  play(on) {
    if (on === this.playing) return;
    this.playing = on;
    this.changed();
    if (!on) return;
    if (this.time >= this.end) this.seek(this.begin);
    let before = performance.now();
    const frame = (now) => {
      if (!this.playing) return;
      this.seek(this.time + (now - before) * NS.ms * this.speed);
      before = now;
      if (this.time >= this.end) this.play(false);
      else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
  }

  /** Choose a request, or nothing. */
  choose(chosen) {
    this.chosen = chosen;
    this.changed();
  }

  /** Light up the blocks of a request, or nothing. */
  point(pointed) {
    this.pointed = pointed;
    this.changed();
  }

  /** Return the number that the request of `what` has on `side`; -1: it is not there. */
  requestOn(side, what) {
    if (!what || what.request < 0) return -1;
    if (what.side === side) return what.request;
    return side.byId.get(what.side.playback.requests.id[what.request]) ?? -1;
  }

  /** Return the request to light up on `side`: that under the pointer, else the chosen one; -1: none. */
  lit(side) {
    return this.requestOn(side, this.pointed ?? this.chosen);
  }
}
App.KEPT = 250; // ms

const SPEEDS = [0.1, 1, 10, 60, 300, 1800, 10800];

/** The clock's controls: play, step, speed, and the scrubber. */
class Controls {
  constructor(app) {
    this.app = app;
    const button = (label, title, press) =>
      element("button", { type: "button", title, "aria-label": title, onclick: press }, label);
    this.toggle = button("Play", "Play or pause (space)", () => app.play(!app.playing));
    this.toggle.id = "play";
    this.scrubber = element("input", {
      type: "range", id: "scrubber", min: 0, max: Controls.STEPS, step: 1, value: 0, "aria-label": "Time",
      oninput: () => app.visitPart(this.scrubber.value / Controls.STEPS),
    });
    this.speed = element("select", {
      id: "speed", "aria-label": "Speed",
      onchange: () => { app.speed = Number(this.speed.value); },
    });
    const whole = (app.end - app.begin) / NS.s / 60; // that shows all in a minute
    const usual = SPEEDS.find((speed) => speed >= whole) ?? SPEEDS.at(-1);
    for (const speed of SPEEDS) {
      this.speed.append(element("option", { value: speed, selected: speed === usual }, `${speed.toLocaleString("en-US")}×`));
    }
    app.speed = usual;
    this.when = element("input", {
      id: "when", inputmode: "decimal", autocomplete: "off", size: 9, "aria-label": "Time in seconds",
      onchange: () => {
        const seconds = Number(this.when.value.replaceAll(",", ""));
        if (Number.isFinite(seconds)) app.seek(Math.round(seconds * NS.s));
        this.when.blur();
      },
    });
    this.row = element("output", { id: "row", class: "soft" });
    this.root = element(
      "div", { class: "controls", role: "group", "aria-label": "Clock" },
      this.toggle,
      button("◂", "One event back (left arrow)", () => { app.play(false); app.stepBack(); }),
      button("▸", "One event on (right arrow)", () => { app.play(false); app.stepForward(); }),
      element("label", {}, this.when, " s"), element("label", {}, "speed ", this.speed), this.scrubber, this.row,
    );
    document.addEventListener("keydown", (event) => this._key(event));
  }

  _key(event) {
    if (event.target.closest("input, select, textarea, button") || event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    const { app } = this;
    const part = (app.end - app.begin) / 100;
    const does = {
      " ": () => app.play(!app.playing),
      ArrowLeft: () => app.stepBack(),
      ArrowRight: () => app.stepForward(),
      PageDown: () => app.seek(app.time + part),
      PageUp: () => app.seek(app.time - part),
      Home: () => app.seek(app.begin),
      End: () => app.seek(app.end),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    if (event.key !== " ") app.play(false);
    does();
  }

  draw() {
    const { app } = this;
    this.toggle.textContent = app.playing ? "Pause" : "Play";
    if (document.activeElement !== this.scrubber || app.playing) {
      this.scrubber.value = Math.round(Controls.STEPS * app.part(app.time));
    }
    this.scrubber.setAttribute("aria-valuetext", format.moment(app.time));
    if (document.activeElement !== this.when) this.when.value = (app.time / NS.s).toFixed(3);
    this.row.textContent = app.sides
      .map((side) => `line ${format.count(side.playback.about.first + side.row + 1)} of ${format.count(side.playback.about.lines)}`)
      .join(" · ");
  }
}
Controls.STEPS = 2000;

/** The pool in numbers: a row a side, as `kvcore replay --at` has them. */
class Counts {
  constructor(app) {
    this.app = app;
    const names = ["free", "cached", "private", "spans", "hit ratio so far"];
    this.cells = app.sides.map((side) =>
      names.map((name) => element("td", { class: "number", "data-title": name, id: `count-${side.number}-${name.replaceAll(" ", "-")}` })));
    const titles = ["", "free blocks", "cached", "private", "spans", "hit ratio so far"];
    const meant = { spans: "Runs of cached blocks that are used together: bars of the prefix tree" };
    this.root = element("div", { class: "scroll" }, element("table", { id: "counts" },
      element("caption", { class: "hidden" }, "The pool at this time"),
      element("thead", {}, element("tr", {}, titles.map((title) =>
        element("th", { scope: "col", class: title && "number", title: meant[title] }, title)))),
      element("tbody", {}, app.sides.map((side, number) =>
        element("tr", {}, element("th", { scope: "row" }, side.name), this.cells[number])))));
  }

  draw() {
    this.app.sides.forEach(({ cache }, number) => {
      const ratio = cache.lookups ? cache.hits / cache.lookups : null;
      const values = [cache.free, cache.cached, cache.private, cache.spans.size].map(format.count);
      [...values, format.share(ratio)].forEach((value, column) => {
        this.cells[number][column].textContent = value;
      });
    });
  }
}

/** Return an introduction to the page for newcomers. */
function introduction({ playback }) {
  const { header } = playback;
  const sizes = new Set(header.cache_groups?.groups.map(({ block_size }) => block_size) ?? [header.block_size]);
  const tokens = [...sizes].sort((one, two) => one - two).map(format.count).join(", ").replace(/, (?=[^ ]*$)/, " or ");
  return element("p", { class: "soft", id: "introduction" },
    `A pool of ${format.counted(header.blocks, "block")} keeps the keys and values (K/V) of ${tokens} token${tokens === "1" ? "" : "s"} ` +
    "each. A request whose prompt begins like an earlier one hits the blocks of that beginning that are still cached; the rest " +
    "misses and is computed. A full pool must evict cached blocks to make room: which ones, the eviction policy decides.");
}

/**
 * Go to where the page opens: the time that was asked for, else the costliest eviction of the trace with fewer hits, unless it
 * takes long to get there.
 */
function open(app) {
  if (app.about.at != null) app.seek(app.about.at);
  else {
    const costliest = app.sides.map((side) => ({ side, costs: side.costs })).filter(({ costs }) => costs?.most)
      .sort(({ costs: one }, { costs: other }) => one.ratio - other.ratio || other.most - one.most)[0];
    if (costliest && costliest.costs.costliest < OPENED_AT) app.seekRow(costliest.side, costliest.costs.costliest);
    else app.seek(app.begin);
  }
}

const OPENED_AT = 2e5; // rows, which a browser plays in less than a second

/** Make the page. */
async function main() {
  const about = await readJson("view");
  const sides = [];
  for (const [number, name] of about.names.entries()) {
    sides.push(new Side(number, name, await Playback.read(`side${number}`)));
  }
  const app = new App(sides, about);
  window.kvcore = app; // for the console, and for tests
  const root = document.querySelector("main");
  root.append(element("header", { class: "top" }, element("h1", {}, about.title), theme.button()));
  for (const notice of about.notices) root.append(element("p", { class: "notice", role: "note" }, notice));
  root.append(introduction(sides[0]), app.add(new Controls(app)));
  if (sides.length > 1) root.append(app.add(new DifferencesPanel(app)));
  root.append(app.add(new Counts(app)));
  const some = (field) => sides.some(({ playback }) => playback.header[field]);
  const left = some("cache_groups") ? [StoryPanel, TreePanel] : some("layer_pools") ? [StoryPanel] : [];
  for (const make of PANELS) {
    if (left.includes(make)) continue;
    root.append(element("div", { class: "sides" }, make.shared
      ? app.add(new make(app))
      : sides.map((side) => app.add(new make(app, side)))));
  }
  for (const side of sides) {
    root.append(element("p", { class: "soft setup" }, sides.length > 1 ? `${side.name}: ` : "", side.playback.about.setup));
  }
  theme.onChange(() => app.changed());
  addEventListener("resize", () => app.changed());
  open(app);
  for (const panel of app.panels) panel.draw();
  document.body.dataset.ready = "";
}

/** The panels below the clock, from above. One that is `shared` is for all sides. */
// Cache groups have no tree of spans, and neither they nor pools of layers an optimum to tell a story by.
const PANELS = [StoryPanel, PoolPanel, TreePanel, TimelinePanel, CurvesPanel, LogPanel, RequestPanel];

await main();
