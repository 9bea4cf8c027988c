// Differences of two traces: in their evictions, and in the contents of their caches.

/** The evictions of a side that differ, with sums, so that counts up to any row are O(log). */
class Marks {
  constructor(side) {
    this.side = side;
    this.rows = side.evictions.filter((row) => side.differs(row));
    let sum = 0;
    this.sums = this.rows.map((row) => (sum += side.differs(row)));
  }

  /** Return how many blocks that differ were evicted up to `row`. */
  upTo(row) {
    return this.sums[countUpTo(this.rows, row) - 1] ?? 0;
  }
}

/** Return how many blocks that a side has cached the other has too, by content. O(spans). */
function heldByBoth(side, other) {
  const { held } = other;
  let both = 0;
  for (const [span, pieces] of side.cachedOn(other)) {
    for (const piece of pieces) for (const [first, end] of held.parts(piece)) both += (end - first) / span.step;
  }
  return Math.round(both);
}

/** Two traces against each other: figures, and a band of the evictions that differ. */
class DifferencesPanel {
  constructor(app) {
    this.app = app;
    this.marks = app.sides.map((side) => new Marks(side));
    this.all = this.marks.flatMap(({ side, rows }) => rows.map((row) => ({ side, row })))
      .sort((one, other) => app.order(one.side, one.row, other.side, other.row) || one.row - other.row);
    this.canvas = element("canvas", { id: "differences", role: "img", height: DifferencesPanel.HEIGHT });
    this.canvas.addEventListener("click", (event) => {
      app.visitPart(event.offsetX / this.canvas.clientWidth);
    });
    const button = (label, title, id, way) =>
      element("button", { type: "button", title, id, onclick: () => this.go(way) }, label);
    this.text = element("p", { id: "differences-text" });
    this.cells = app.sides.map(() => DifferencesPanel.FIGURES.map(() => element("td", { class: "number" })));
    this.root = element(
      "section", { class: "panel", "aria-label": "Differences" },
      element("header", {}, element("h2", {}, "Differences"),
        button("◂ Difference", "The eviction before that differs (D)", "difference-before", -1),
        button("Difference ▸", "The next eviction that differs (d)", "difference-next", 1)),
      app.about.note ? element("p", { class: "notice" }, app.about.note) : null,
      this.canvas, element("div", { class: "legend" },
        app.sides.map((side, number) => element("span", {}, element("i", { style: filled(DifferencesPanel.COLOURS[number]) }),
          `${number ? "below" : "above"}: blocks that ${side.name} evicts, and the other not for the same request`))),
      this.text,
      element("div", { class: "scroll" }, element("table", { id: "figures" },
        element("thead", {}, element("tr", {}, ["", ...DifferencesPanel.FIGURES].map((name) =>
          element("th", { scope: "col", class: name && "number" }, name)))),
        element("tbody", {}, app.sides.map((side, number) =>
          element("tr", {}, element("th", { scope: "row" }, side.name), this.cells[number]))))),
    );
    document.addEventListener("keydown", (event) => {
      if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "d") this.go(1);
      if (event.key === "D") this.go(-1);
    });
  }

  /** Go to the next (1) or the last (-1) eviction that differs, of whichever side it is. */
  go(way) {
    const { app, at, all } = this;
    app.play(false);
    // Both sides may have evicted for one request. Where a key has led to one, the state of the
    // other side does not tell which of its own have been visited.
    const known = at && app.time === at.time && at.rows.every((row, number) => row === app.sides[number].row);
    const future = all.findIndex(({ side, row }) => row > side.row);
    const after = future < 0 ? all.length : future;
    const last = all[after - 1];
    const here = last && last.side.row === last.row && last.side.playback.times[last.row] === app.time;
    const place = known ? at.place + way : way > 0 ? after : after - (here ? 2 : 1);
    const next = all[place];
    if (!next) return;
    app.seekRow(next.side, next.row);
    this.at = { ...next, place, time: app.time, rows: app.sides.map(({ row }) => row) };
  }

  draw() {
    const { app, marks } = this;
    this._band();
    if (app.keeps(this)) return;
    const [left, right] = app.sides;
    const both = left.compared ? [heldByBoth(left, right), heldByBoth(right, left)] : null;
    const ratios = app.sides.map(({ cache }) => (cache.lookups ? cache.hits / cache.lookups : 0));
    const totals = app.sides.map(({ contents: { totals: { hits, lookups } } }) => (lookups ? hits / lookups : 0));
    app.sides.forEach((side, number) => {
      const values = [
        format.share(totals[number]), format.count(Lives.of(side).evictedAt(side.row)),
        both ? format.count(marks[number].upTo(side.row)) : "", both ? format.count(side.cache.cached - both[number]) : "",
      ];
      values.forEach((value, column) => { this.cells[number][column].textContent = value; });
    });
    this.text.textContent = this._sentence(ratios, totals, both?.[1]);
  }

  /** Return the figures as a sentence. */
  _sentence(ratios, totals, both) {
    const { app, marks } = this;
    const [left, right] = app.sides;
    const first = marks.map(({ side, rows }) => (rows.length ? side.playback.times[rows[0]] : Infinity));
    if (Math.min(...first) === Infinity) return app.about.note ? "" : "Both evict the same blocks for the same requests.";
    const ahead = (values) => {
      if (format.share(values[0]) === format.share(values[1])) return "both have hit as much";
      const [name, points] = values[1] >= values[0] ? [right.name, values[1] - values[0]] : [left.name, values[0] - values[1]];
      return `${name} is ${(100 * points).toFixed(1)} points of the hit ratio ahead`;
    };
    const kept = right.cache.cached - both;
    const start = Math.min(...first);
    return app.time < start
      ? `Both have done the same until now; their evictions part at ${format.moment(start)}.`
      : `Both evicted the same until ${format.moment(start)}. Now ${ahead(ratios)}, and at the end ${ahead(totals)}. ` +
        `${right.name} has ${format.counted(kept, "block")} cached that ${left.name} has not, and ${format.count(both)} are in both.`;
  }

  /** Draw the band: by pixel, how many blocks differ, left above and right below the line. */
  _band() {
    const { app, canvas } = this;
    const width = canvas.clientWidth;
    if (!width) return;
    if (width !== this.width) {
      this.width = width;
      this.columns = this.marks.map(({ side, rows }) => {
        const column = new Float64Array(width);
        for (const row of rows) {
          const x = Math.floor(width * app.part(side.playback.times[row]));
          column[Math.min(width - 1, x)] += side.differs(row);
        }
        return column;
      });
      this.most = Math.max(1, ...this.columns.map((column) => column.reduce((most, each) => Math.max(most, each), 0)));
    }
    const { context } = fitCanvas(canvas, DifferencesPanel.HEIGHT);
    const middle = DifferencesPanel.HEIGHT / 2;
    this.columns.forEach((column, number) => {
      context.fillStyle = theme.colour(DifferencesPanel.COLOURS[number]);
      column.forEach((blocks, x) => {
        if (!blocks) return;
        const height = 2 + (middle - 3) * Math.sqrt(blocks / this.most); // so that one block is seen
        context.fillRect(x, number ? middle + 0.5 : middle - 0.5 - height, 1, height);
      });
    });
    context.fillStyle = theme.colour("line");
    context.fillRect(0, middle - 0.5, width, 1);
    context.fillStyle = theme.colour("ink");
    context.fillRect((width - 2) * app.part(app.time), 0, 2, DifferencesPanel.HEIGHT);
    canvas.setAttribute("aria-label", this.marks.map(({ side, rows }) => {
      const evictions = format.counted(side.evictions.length, "eviction");
      return `${side.name}: ${side.compared ? `${format.count(rows.length)} of ${evictions} differ` : evictions}`;
    }).join("; "));
  }
}
DifferencesPanel.shared = true;
DifferencesPanel.HEIGHT = 44;
DifferencesPanel.COLOURS = ["orange", "blue"];
DifferencesPanel.FIGURES = ["hit ratio in the end", "blocks evicted so far", "differing", "cached only here"];
