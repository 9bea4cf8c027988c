// The serving timeline: one row a sequence, with arrows from evicted requests to those that evicted them.

/** How each phase is drawn: in a colour, with the lines of a pattern for requests that wait. */
const BARS = {
  queued: { colour: "grey", lines: 1 },
  loading: { colour: "yellow", lines: 0 },
  prefill: { colour: "orange", lines: 0 },
  decode: { colour: "blue", lines: 0 },
  preempted: { colour: "pink", lines: 2 },
};

/** The part of the run that timelines show: `start` and `width` in ns, or without a clock in rows. */
class TimelineWindow {
  constructor(app, side) {
    const lives = Lives.of(side);
    this.timed = !lives.untimed;
    this.least = this.timed ? app.begin : 0;
    this.most = Math.max(this.least + 1, this.timed ? app.end : side.playback.length - 1);
    const whole = this.most - this.least;
    this.width = Math.min(whole, (whole * TimelineWindow.REQUESTS) / Math.max(1, lives.born.length));
    this.start = this.least;
    this.clock = null;
  }

  get end() {
    return this.start + this.width;
  }

  /** Move so that a clock that moved is seen. */
  follow(clock, playing) {
    if (clock === this.clock) return;
    this.clock = clock;
    const at = (clock - this.start) / this.width;
    if (playing && at > 0.8 && at < 1.1) this.start = clock - 0.8 * this.width;
    else if (at < 0.02 || at > 0.95) this.start = clock - 0.6 * this.width;
    this._keep();
  }

  /** Show `factor` times as much around `centre`. */
  zoom(factor, centre = this.clock ?? this.start) {
    const width = Math.max(this.timed ? NS.ms : 10, Math.min(this.most - this.least, this.width * factor));
    const at = Math.max(0, Math.min(1, (centre - this.start) / this.width));
    this.start = this.start + at * (this.width - width);
    this.width = width;
    this._keep();
  }

  pan(by) {
    this.start += by;
    this._keep();
  }

  _keep() {
    this.start = Math.max(this.least, Math.min(this.most - this.width * 0.9, this.start));
  }
}
TimelineWindow.REQUESTS = 25; // that come while a window passes, at first

/** The serving timeline: one row a sequence. */
class TimelinePanel {
  constructor(app, side) {
    Object.assign(this, { app, side, shown: [], pointers: new Map() });
    this.lives = Lives.of(side);
    // Sides with a clock move together.
    if (this.lives.untimed) this.window = new TimelineWindow(app, side);
    else this.window = app.timelineWindow ??= new TimelineWindow(app, side);
    const name = app.titled("Timeline", side);
    const button = (text, label, press) =>
      element("button", { type: "button", title: label, "aria-label": label, onclick: press }, text);
    const zoom = (factor) => () => this._zoom(factor);
    this.canvas = element("canvas", { tabindex: 0, role: "img", class: "timeline", "aria-label": name });
    this.note = element("p", { class: "soft note" });
    this.story = element("p", { class: "note", id: `timeline-note-${side.number}` });
    this.table = element("tbody");
    this.details = element("details", { ontoggle: () => this._list() },
      element("summary", {}, "Requests at this time, as a table"),
      element("div", { class: "scroll" }, element("table", {},
        element("thead", {}, element("tr", {}, ["request", "does", "since", "for how long yet"].map((title) =>
          element("th", { scope: "col" }, title)))), this.table)));
    this.root = element("section", { class: "panel", "aria-label": name },
      element("header", {}, element("h2", {}, name), this._legend(),
        element("span", { class: "buttons" },
          button("−", "Show more time (-)", zoom(2)), button("+", "Show less time (+)", zoom(0.5)),
          button("‹", "Earlier ([)", () => this._pan(-0.5)), button("›", "Later (])", () => this._pan(0.5)))),
      this.canvas, this.note, this.story, this.details);
    this._listen();
  }

  _legend() {
    const phases = PHASES.map((phase) => element("span", {}, element("i", { class: `bar-${phase}` }), phase));
    const marks = { "first token": "mark-first", [this.side.compared ? "evicts blocks; hollow: as the other does" : "evicts blocks"]: "mark-evict" };
    const others = Object.entries(marks).map(([text, mark]) => element("span", {}, element("i", { class: mark }), text));
    return element("div", { class: "legend" }, phases, this.lives.untimed ? others.slice(1) : others);
  }

  /** Where a row is along the window. */
  _at(row) {
    return this.window.timed ? this.side.playback.times[row] : row;
  }

  get _clock() {
    return this.window.timed ? this.app.time : Math.max(0, this.side.row);
  }

  _zoom(factor, centre) {
    this.window.zoom(factor, centre);
    this.app.changed();
  }

  _pan(part) {
    this.window.pan(part * this.window.width);
    this.app.changed();
  }

  _listen() {
    const { canvas, app, side, pointers } = this;
    const place = ({ clientX, clientY }) => {
      const { left, top, width } = canvas.getBoundingClientRect();
      return { at: this.window.start + ((clientX - left) / width) * this.window.width, y: clientY - top, width };
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, { x: event.clientX, from: event.clientX, moved: false });
    });
    canvas.addEventListener("pointermove", (event) => {
      const { at, y, width } = place(event);
      const pointer = pointers.get(event.pointerId);
      if (!pointer) {
        this._point(this._request(at, y));
        return;
      }
      const apart = () => Math.abs([...pointers.values()].reduce((sum, each, number) => sum + (number ? -each.x : each.x), 0));
      const before = apart();
      const by = event.clientX - pointer.x;
      pointer.moved ||= Math.abs(event.clientX - pointer.from) > 4;
      pointer.x = event.clientX;
      if (pointers.size === 2) this._zoom(Math.max(1, before) / Math.max(1, apart()), at);
      else if (pointer.moved) this._pan(-by / width);
    });
    canvas.addEventListener("pointerup", (event) => {
      const pointer = pointers.get(event.pointerId);
      pointers.delete(event.pointerId);
      if (!pointer || pointer.moved) return;
      const { at, y } = place(event);
      const request = this._request(at, y);
      app.choose(request < 0 ? null : { side, request });
    });
    canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => { if (!pointers.size) this._point(-1); });
    canvas.addEventListener("blur", () => this._point(-1));
    canvas.addEventListener("wheel", (event) => {
      // A wheel scrolls the page, unless it is a pinch or the timeline has the focus.
      if (!event.ctrlKey && document.activeElement !== canvas) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this._pan(event.deltaX / 1000);
      else this._zoom(2 ** (event.deltaY / (event.ctrlKey ? 50 : 200)), place(event).at);
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const does = {
        "+": () => this._zoom(0.5), "=": () => this._zoom(0.5), "-": () => this._zoom(2),
        "[": () => this._pan(-0.5), "]": () => this._pan(0.5),
        ArrowDown: () => this._step(1), ArrowUp: () => this._step(-1),
        Enter: () => { if (app.pointed) app.choose({ side, request: app.requestOn(side, app.pointed) }); },
      }[event.key];
      if (!does || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      does();
    });
  }

  _point(request) {
    if (request < 0 && !this.app.pointed) return;
    if (this.app.pointed?.request === request && this.app.pointed.side === this.side) return;
    this.app.point(request < 0 ? null : { side: this.side, request, block: -1 });
  }

  /** Point to the next of the requests that are shown. */
  _step(by) {
    if (!this.shown.length) return;
    const at = this.shown.findIndex(({ request }) => request === this.app.lit(this.side));
    this._point(this.shown[(at + by + this.shown.length + (at < 0 && by < 0)) % this.shown.length].request);
  }

  /** Return the request that is drawn at a place; -1: none. */
  _request(at, y) {
    const slack = (3 / this.canvas.clientWidth) * this.window.width;
    const found = this.shown.find((each) => y >= each.y && y < each.y + this.height && at >= each.from - slack && at <= each.to + slack);
    return found?.request ?? -1;
  }

  draw() {
    const { app, window } = this;
    window.follow(this._clock, app.playing);
    const { canvas } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width) return;
    const { context: pen } = fitCanvas(canvas, height);
    this.ink = Object.fromEntries(
      ["ink", "soft", "faint", "panel", "line", ...Object.values(BARS).map(({ colour }) => colour)].map((name) => [name, theme.colour(name)]));
    this.x = (row) => ((this._at(row) - window.start) / window.width) * width;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    const room = height - TimelinePanel.AXIS;
    this._axis(pen, width, room);
    const { lives } = this;
    const fit = (layout) => {
      layout.seen = this._visible(layout.begins, layout.lane);
      layout.lanes = [...new Set(layout.seen.map((each) => layout.lane[each]))].sort((low, high) => low - high);
      layout.height = TimelinePanel.HEIGHTS.find((each) => each * layout.lanes.length <= room - layout.top);
      return layout;
    };
    // A row for each that is there; else for each that is served; else none.
    const all = fit({ begins: lives.begins, lane: lives.lane, top: 0 });
    this.layout = all.height ? all : fit({
      begins: lives.admitted, lane: lives.servedLane, top: lives.untimed ? 0 : TimelinePanel.QUEUE,
    });
    this.height = this.layout.height;
    this.shown = [];
    this.places = new Map();
    if (!this.height) this._bands(pen, width, 0, room, TimelinePanel.STACK);
    else {
      if (this.layout.top) this._bands(pen, width, 0, this.layout.top - 4, ["queued"]);
      this._rows(pen, width);
    }
    this._line(pen, width, height);
    this._tell(all.seen.length);
    if (this.details.open) this._list();
  }

  /** Return the requests of which something is in the window, by lane. */
  _visible(begins, lane) {
    const { ended, born } = this.lives;
    const { start, end } = this.window;
    const found = [];
    for (const each of born) {
      if (begins[each] >= 0 && this._at(begins[each]) <= end && this._at(ended[each]) >= start) found.push(each);
    }
    return found.sort((left, right) => lane[left] - lane[right] || begins[left] - begins[right]);
  }

  _axis(pen, width, room) {
    const { window, ink } = this;
    const unit = window.timed ? NS.s : 1;
    const least = (window.width / unit / width) * 90;
    const power = 10 ** Math.floor(Math.log10(least));
    const step = Math.max(window.timed ? 0 : 1, [1, 2, 5, 10].map((each) => each * power).find((each) => each >= least));
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    pen.fillStyle = ink.soft;
    pen.strokeStyle = ink.faint;
    pen.lineWidth = 1;
    for (let tick = Math.ceil(window.start / unit / step); tick * step * unit <= window.end; tick++) {
      const x = Math.round(((tick * step * unit - window.start) / window.width) * width) + 0.5;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, room);
      pen.stroke();
      const text = (tick * step).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
      const label = window.timed ? `${text} s` : `line ${text}`;
      const wide = pen.measureText(label).width;
      pen.fillText(label, Math.max(0, Math.min(width - wide, x - wide / 2)), room + 14);
    }
  }

  /** Return how a phase is filled. */
  _fill(pen, phase) {
    const { colour, lines } = BARS[phase];
    if (!lines) return this.ink[colour];
    const tile = new OffscreenCanvas(6 * devicePixelRatio, 6 * devicePixelRatio);
    const to = tile.getContext("2d");
    to.scale(devicePixelRatio, devicePixelRatio);
    to.strokeStyle = this.ink[colour];
    to.globalAlpha = 0.3;
    to.fillStyle = this.ink[colour];
    to.fillRect(0, 0, 6, 6);
    to.globalAlpha = 1;
    to.lineWidth = 1.2;
    for (const [from, upto] of [[6, 0], [0, 6]].slice(0, lines)) {
      for (const shift of [-6, 0, 6]) {
        to.beginPath();
        to.moveTo(shift, from);
        to.lineTo(shift + 6, upto);
        to.stroke();
      }
    }
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / devicePixelRatio));
    return pattern;
  }

  /** Draw a bar for each request, with its phases and events. */
  _rows(pen, width) {
    const { lives, height, window } = this;
    const { seen, lanes, lane, begins, top } = this.layout;
    const { kind, start, end } = lives.phases;
    const fills = PHASES.map((phase) => this._fill(pen, phase));
    const line = new Map(lanes.map((each, number) => [each, top + number * height]));
    const thick = height - Math.max(2, Math.round(height / 6));
    for (const request of seen) {
      const y = line.get(lane[request]);
      this.places.set(request, y);
      this.shown.push({ request, y, from: this._at(begins[request]), to: this._at(lives.ended[request]) });
      for (const phase of lives.phasesOf(request)) {
        if (start[phase] < begins[request]) continue;
        const from = Math.max(-2, this.x(start[phase]));
        const upto = Math.min(width + 2, this.x(end[phase]));
        if (upto <= from) continue;
        pen.fillStyle = fills[kind[phase]];
        pen.fillRect(from, y, Math.max(1, upto - from), thick);
      }
      pen.fillStyle = this.ink.panel;
      for (const chunk of lives.chunksOf(request)) pen.fillRect(this.x(lives.chunks.row[chunk]) - 0.5, y, 1, thick);
      if (height > 8) this._name(pen, request, y, thick, width);
      pen.fillStyle = this.ink.ink;
      if (lives.first[request] >= 0 && !lives.untimed) pen.fillRect(this.x(lives.first[request]) - 1, y - 1, 2, thick + 2);
    }
    const { row: rows } = lives.evictions;
    const { request } = this.side.playback.columns;
    for (let at = firstIndex(rows.length, (each) => this._at(rows[each]) >= window.start); this._at(rows[at]) <= window.end; at++) {
      const y = this.places.get(request[rows[at]]);
      if (y !== undefined) this._triangle(pen, this.x(rows[at]), y + thick, Math.min(4, height / 2.5), this._alike(rows[at]));
    }
    this._links(pen, thick);
  }

  /** Write the id of a request into its bar, where there is room after its first token; without a clock beside it. */
  _name(pen, request, y, thick, width) {
    const { lives } = this;
    const end = this.x(lives.ended[request]);
    const from = Math.max(0, this.x(Math.max(lives.first[request], lives.admitted[request], lives.begins[request])));
    const text = this.side.playback.requests.id[request].slice(0, 12);
    pen.font = `${Math.min(11, thick)}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    const wide = pen.measureText(text).width;
    const inside = Math.min(width, end) - from >= wide + 8;
    if (!inside && (!lives.untimed || this.layout.lanes.length < 2)) return;
    pen.fillStyle = inside ? this.ink.panel : this.ink.soft;
    const beside = end + wide + 8 < width ? end + 5 : this.x(this.layout.begins[request]) - wide - 5;
    pen.fillText(text, inside ? from + 4 : beside, y + thick / 2 + 0.5);
  }

  /** Return whether the other trace has the same eviction. */
  _alike(row) {
    return this.side.compared && !this.side.differs(row);
  }

  _triangle(pen, x, y, size, hollow) {
    pen.beginPath();
    pen.moveTo(x - size, y + 1);
    pen.lineTo(x + size, y + 1);
    pen.lineTo(x, y + 1 - 1.4 * size);
    pen.closePath();
    pen.fillStyle = hollow ? this.ink.panel : this.ink.ink;
    pen.strokeStyle = this.ink.ink;
    pen.fill();
    if (hollow) pen.stroke();
  }

  /** Draw the evictions and preemptions for the request that is lit up, and of it for others. */
  _links(pen, thick) {
    const { app, side, lives, places, ink } = this;
    const lit = app.lit(side);
    const own = places.get(lit);
    if (own === undefined) return;
    pen.strokeStyle = ink.ink;
    pen.fillStyle = ink.ink;
    pen.lineWidth = 2;
    const begin = this.x(this.layout.begins[lit]);
    pen.strokeRect(begin - 1, own - 1, this.x(lives.ended[lit]) - begin + 2, thick + 2);
    pen.lineWidth = 1;
    const arrow = (from, to, row) => {
      const [y, upto] = [places.get(from), places.get(to)];
      if (y === undefined || upto === undefined || from === to) return;
      // From the row of the request that lost blocks or its place to the row of the other.
      const begin = Math.max(this.x(this.layout.begins[from]), Math.min(this.x(row), this.x(lives.ended[from])));
      const x = this.x(row);
      const down = upto > y ? 1 : -1;
      pen.beginPath();
      pen.moveTo(begin, y + thick / 2);
      pen.lineTo(x, upto + (down > 0 ? 0 : thick));
      pen.stroke();
      pen.beginPath();
      pen.arc(begin, y + thick / 2, 2, 0, 7);
      pen.fill();
    };
    const { columns } = side.playback;
    const { made, took } = lives.evictionsOf(lit, side.contents);
    const { cache_groups } = side.playback.header; // of which rows do not tell who lost blocks
    if (!cache_groups) for (const row of made) arrow(columns.d[row], lit, row);
    for (const row of took) arrow(lit, columns.request[row], row);
    for (const phase of lives.preempted) {
      const [victim, whom] = [lives.phases.request[phase], lives.phases.whom[phase]];
      if (whom === lit || victim === lit) arrow(victim, whom, lives.phases.start[phase]);
    }
  }

  /** Draw how many requests are in some phases, from `top` to `bottom`: there are too many for rows. */
  _bands(pen, width, top, bottom, phases) {
    const { lives, window, side } = this;
    const stacks = Array.from({ length: Math.ceil(width) }, (_, x) => {
      const at = window.start + ((x + 0.5) / width) * window.width;
      const row = window.timed ? side.playback.rowAt(at) : Math.floor(at);
      return phases.map((phase) => lives.countAt(PHASE[phase], row));
    });
    const most = Math.max(1, ...stacks.map((stack) => stack.reduce((sum, each) => sum + each, 0)));
    const room = bottom - top;
    let under = stacks.map(() => 0);
    phases.forEach((phase, level) => {
      pen.fillStyle = this._fill(pen, phase);
      under = under.map((below, x) => {
        const each = stacks[x][level];
        if (each) pen.fillRect(x, bottom - (room * (below + each)) / most, 1, (room * each) / most);
        return below + each;
      });
    });
    const label = `${phases.length > 1 ? format.counted(most, "request") : `${format.count(most)} ${phases[0]}`} at most`;
    pen.fillStyle = this.ink.panel;
    pen.fillRect(2, top + 1, pen.measureText(label).width + 6, 14);
    pen.fillStyle = this.ink.ink;
    pen.fillText(label, 5, top + 12);
  }

  /** Draw the clock. */
  _line(pen, width, height) {
    const x = ((this._clock - this.window.start) / this.window.width) * width;
    pen.fillStyle = this.ink.ink;
    pen.fillRect(x - 0.75, 0, 1.5, height);
  }

  /** Write the drawing in words, and the life of the request that is lit up. */
  _tell(seen) {
    const { app, side, lives, window } = this;
    if (app.keeps(this)) return;
    const row = Math.max(0, side.row);
    const counts = PHASES.map((phase, kind) => [phase, lives.countAt(kind, row)]).filter(([, count]) => count);
    const now = counts.length ? counts.map(([phase, count]) => `${format.count(count)} ${phase}`).join(", ") : "no request";
    const range = window.timed
      ? `${format.duration(window.width)} of the run`
      : "the run by its lines, since it has no clock: each request is served at once";
    const { lanes, top } = this.layout;
    const rows = top ? `${format.counted(this.shown.length, "request")} that are served in` : "in";
    const shown = this.height
      ? `${format.counted(seen, "request")}, ${rows} ${format.counted(lanes.length, "row")}${top ? ", and above how many are queued" : ""}`
      : `${format.counted(seen, "request")}, too many for a row each: how many are in which phase; zoom in to see them`;
    this.note.textContent = `Now: ${now}. Shown: ${range}, ${shown}.`;
    const lit = app.lit(side);
    this.story.textContent = lit < 0
      ? "Point at a request, or press ↑ and ↓ here, to see what it does and who was evicted for it."
      : this.sentence(lit);
    this.canvas.setAttribute("aria-label", `${this.root.getAttribute("aria-label")}. ${this.note.textContent} ${this.story.textContent}`);
  }

  /** Return the life of a request in a sentence. */
  sentence(request) {
    const { side, lives } = this;
    const { playback } = side;
    const { times, columns } = playback;
    const name = (each) => playback.requests.id[each];
    const { kind, start, end, whom } = lives.phases;
    const phases = [...lives.phasesOf(request)].filter((phase) => times[end[phase]] > times[start[phase]]).map((phase) =>
      `${PHASES[kind[phase]]} ${format.duration(times[end[phase]] - times[start[phase]])}` +
      `${whom[phase] >= 0 ? ` for request ${name(whom[phase])}` : ""}`);
    const told = [`Request ${name(request)}`];
    if (lives.begins[request] < 0) return `${told[0]} is not in this part of the run.`;
    const edge = lives.earlier.has(request) ? "before the lines that are here; since " : "";
    told.push(`from ${edge}${format.moment(times[lives.begins[request]])}${phases.length ? `: ${phases.join(", ")}` : ", served at once"}.`);
    const { made, took } = lives.evictionsOf(request, side.contents);
    const blocks = (rows) => format.counted(rows.reduce((sum, row) => sum + playback.blocksOf(row), 0), "block");
    const names = (rows, column) => {
      const some = [...new Set(rows.map((row) => columns[column][row]))];
      const more = some.length > 4 ? ` and ${format.count(some.length - 4)} more` : "";
      return `${some.length > 1 ? "requests" : "request"} ${some.slice(0, 4).map(name).join(", ")}${more}`;
    };
    if (made.length) told.push(playback.header.cache_groups ? `Evicted for it: ${blocks(made)}.` : `For it ${names(made, "d")} lost ${blocks(made)}.`);
    if (took.length) told.push(`Blocks of its prompt were evicted for ${names(took, "request")}.`);
    return told.join(" ");
  }

  /** List the requests that are there now. */
  _list() {
    if (!this.details.open) return;
    const { lives, app, side } = this;
    const { playback } = side;
    const { kind, start, end } = lives.phases;
    const row = Math.max(0, side.row);
    const found = [];
    for (const each of lives.born) {
      if (lives.begins[each] > row || found.length >= TimelinePanel.LISTED) break;
      const phase = lives.ended[each] >= row ? lives.phaseIndexAt(each, row) : -1;
      if (phase >= 0) found.push(phase);
    }
    this.table.replaceChildren(...found.map((phase) => {
      const request = lives.phases.request[phase];
      return element("tr", {},
        element("td", {}, element("button", { type: "button", class: "ref", onclick: () => app.choose({ side, request }) }, playback.requests.id[request])),
        element("td", {}, PHASES[kind[phase]]),
        element("td", { class: "number" }, format.moment(playback.times[start[phase]])),
        element("td", { class: "number" }, format.duration(playback.times[end[phase]] - playback.times[row])));
    }));
  }
}
TimelinePanel.AXIS = 18;
TimelinePanel.HEIGHTS = [18, 14, 11, 8, 6];
TimelinePanel.LISTED = 50;
TimelinePanel.QUEUE = 56; // px of the band of queued requests
TimelinePanel.STACK = ["decode", "prefill", "loading", "preempted", "queued"];
