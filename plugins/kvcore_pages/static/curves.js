// Curves over time: contents of the pool, hits, evictions, requests, and tiers.

/** A curve that keeps, of each of equal stretches of time, its first, last, lowest and highest value. */
class Thinned {
  constructor(begin, end, stretches) {
    Object.assign(this, { begin, stretches, scale: stretches / Math.max(1, end - begin), stretch: -1, held: [] });
    this.x = [];
    this.y = [];
  }

  /** Add a value, not earlier than those before. */
  add(time, value) {
    const stretch = Math.min(this.stretches - 1, Math.floor((time - this.begin) * this.scale));
    if (stretch !== this.stretch) {
      this._flush();
      this.stretch = stretch;
      const point = { time, value };
      this.held = [point, point, point, point]; // first, lowest, highest, last
      return;
    }
    const [, low, high, last] = this.held;
    if (value === last.value) return;
    const point = { time, value };
    if (value < low.value) this.held[1] = point;
    if (value > high.value) this.held[2] = point;
    this.held[3] = point;
  }

  _flush() {
    for (const { time, value } of [...new Set(this.held)].sort((one, other) => one.time - other.time)) {
      this.x.push(time / NS.s);
      this.y.push(value);
    }
    this.held = [];
  }

  /** Return the curve, up to `end`. */
  done(end) {
    this._flush();
    if (this.y.length) {
      this.x.push(end / NS.s);
      this.y.push(this.y.at(-1));
    }
    return { x: this.x, y: this.y };
  }
}

/** The curves of one trace, thinned. */
class Series {
  constructor(side, app) {
    const { playback } = side;
    const { columns, kinds, words, times, header, about } = playback;
    const { kind, a, b, c, d } = columns;
    const lives = Lives.of(side);
    const tiers = (header.tiers ?? []).map(() => 0);
    const begun = app.begin;
    const thinned = () => new Thinned(begun, app.end, Series.STRETCHES);
    const names = ["cached", "private", "waiting", "running", "ratio", "recent", ...tiers.map((_, tier) => `tier${tier}`)];
    const curves = Object.fromEntries(names.map((name) => [name, thinned()]));
    this.rate = Math.max(1, (app.end - app.begin) / Series.BARS); // ns of a bar of evictions
    const evicted = new Float64Array(Series.BARS);
    const start = Series.begun(about);
    let { cached, own } = start;
    start.tiers.forEach((used, tier) => { tiers[tier] = used; });
    const steps = { starts: PHASES.map(() => 0), ends: PHASES.map(() => 0) };
    const count = (phase, row) => {
      const at = PHASE[phase];
      for (const side of ["starts", "ends"]) {
        while (lives[side][at][steps[side][at]] <= row) steps[side][at] += 1;
      }
      return steps.starts[at] - steps.ends[at];
    };
    const { row: admitted, lookups, hits } = lives.admissions;
    let [last, first] = [-1, -1];
    for (let row = 0; row < playback.length; row++) {
      const of = kind[row];
      const blocks = of === kinds.COMMIT ? 0 : playback.blocksOf(row);
      if (of === kinds.ALLOC) own += blocks;
      else if (of === kinds.COPY) own += 1;
      else if (of === kinds.COMMIT) {
        if (["new", "grown", "copy"].includes(words.committed[d[row]])) {
          cached += c[row];
          own -= c[row];
        }
      } else if (of === kinds.EVICT) {
        cached -= blocks;
        evicted[Math.min(Series.BARS - 1, Math.floor((times[row] - app.begin) / this.rate))] += blocks;
      } else if (of === kinds.FREE || of === kinds.FORGET) own -= blocks;
      else if (of === kinds.COMPACT) own += d[row] - blocks;
      else if (of === kinds.OFFLOAD || of === kinds.RECOVER) tiers[a[row]] += c[row];
      else if (of === kinds.DROP) tiers[a[row]] -= c[row];
      const now = times[row];
      if (times[row + 1] === now) continue; // a moment is over with its last row
      while (admitted[last + 1] <= row) last += 1;
      while (times[admitted[first + 1]] <= now - Series.RECENT) first += 1;
      curves.cached.add(now, cached);
      curves.private.add(now, own);
      curves.waiting.add(now, count("queued", row) + count("preempted", row));
      curves.running.add(now, count("loading", row) + count("prefill", row) + count("decode", row));
      if (lookups[last]) curves.ratio.add(now, hits[last] / lookups[last]);
      const since = (sums, sum) => (sums[last] ?? sum) - (sums[first] ?? sum);
      const asked = since(lookups, lives.before.lookups);
      if (asked) curves.recent.add(now, since(hits, lives.before.hits) / asked);
      tiers.forEach((used, tier) => curves[`tier${tier}`].add(now, used));
    }
    for (const [name, curve] of Object.entries(curves)) this[name] = curve.done(playback.end);
    const x = Array.from(evicted, (_, bar) => (app.begin + bar * this.rate) / NS.s);
    this.evicted = { x, y: Array.from(evicted, (blocks) => (blocks * NS.s) / this.rate) };
  }

  /** Return the blocks in use before the first row. */
  static begun({ begin }) {
    if (!begin) return { cached: 0, own: 0, tiers: [] };
    const sum = (lists) => lists.reduce((blocks, ids) => blocks + ids.length, 0);
    return { cached: sum(begin.spans.ids), own: new Set(begin.sequences.ids.flat()).size, tiers: begin.tiers.map(({ used }) => used) };
  }
}
Series.STRETCHES = 375; // of up to four points
Series.BARS = 300;
Series.RECENT = 60 * NS.s;

/** The charts: names of their series, colours, and values now. */
const CHARTS = [
  { title: "Pool, blocks", curves: [
    { name: "cached", colour: "blue", now: ({ side }) => format.count(side.cache.cached) },
    { name: "private", colour: "green", now: ({ side }) => format.count(side.cache.private) },
  ] },
  { title: "Hit ratio, of blocks looked up", share: true, curves: [
    { name: "ratio", label: "so far", colour: "blue", now: ({ side }) => format.share(side.cache.lookups ? side.cache.hits / side.cache.lookups : null) },
    { name: "recent", label: "of the last 60 s", colour: "orange", thin: true, now: ({ lives, row }) => format.share(lives.ratioAt(row, Series.RECENT)) },
  ] },
  { title: "Evicted blocks a second", curves: [
    { name: "evicted", label: "evicted so far", colour: "pink", now: ({ lives, row }) => `${format.count(lives.evictedAt(row))} blocks` },
  ] },
  { title: "Requests", clocked: true, curves: [
    { name: "waiting", colour: "orange", now: ({ lives, row }) => format.count(lives.countAt(PHASE.queued, row) + lives.countAt(PHASE.preempted, row)) },
    { name: "running", colour: "blue", now: ({ lives, row }) =>
      format.count(["loading", "prefill", "decode"].reduce((sum, phase) => sum + lives.countAt(PHASE[phase], row), 0)) },
  ] },
];
const TIER_COLOURS = ["yellow", "sky", "grey"];

/** Of two traces each has a colour; the second curve of a chart is thin. */
const SIDE_COLOURS = ["blue", "orange"];

/** Curves over time: all sides in one. */
class CurvesPanel {
  constructor(app) {
    this.app = app;
    this.series = null;
    this.charts = this._charts().map((chart) => this._chart(chart));
    this.wait = element("p", { class: "soft" }, "Curves are drawn in a moment.");
    const names = app.sides.length > 1 ? element("div", { class: "legend" }, app.sides.map(({ name }, number) =>
      element("span", {}, element("i", { style: filled(SIDE_COLOURS[number]) }), `${name}${number ? ", dashed" : ""}`))) : null;
    this.root = element("section", { class: "panel", id: "curves", "aria-label": "Curves over time" },
      element("header", {}, element("h2", {}, "Curves"), element("span", { class: "soft" }, "Press or drag to go to a time.")),
      names, this.wait, element("div", { class: "curves" }, this.charts.map(({ root }) => root)));
    // After the first paint: the library takes a while to compile.
    requestAnimationFrame(() => setTimeout(() => this._load()));
  }

  _charts() {
    const names = this.app.sides.flatMap(({ playback }) => (playback.header.tiers ?? []).map(({ tier }) => tier));
    const tiers = [...new Set(names)];
    const charts = this.app.sides.every(({ playback }) => playback.header.mode === "untimed")
      ? CHARTS.filter(({ clocked }) => !clocked) : CHARTS; // without a clock no request waits
    if (!tiers.length) return charts;
    const of = (side, name) => (side.playback.header.tiers ?? []).findIndex(({ tier }) => tier === name);
    return [...charts, { title: "Tiers, blocks", curves: tiers.map((tier, number) => ({
      label: tier, colour: TIER_COLOURS[number % TIER_COLOURS.length],
      series: (side) => `tier${of(side, tier)}`,
      now: ({ side }) => format.count(side.cache.tiers[of(side, tier)]?.used ?? 0),
    })) }];
  }

  _chart(chart) {
    const { app } = this;
    const several = app.sides.length > 1;
    const curves = chart.curves.map((curve, number) => {
      const part = curve.name === "evicted" && app.sides.some(({ playback }) => playback.about.begin);
      const label = `${curve.label ?? curve.name}${part ? " in this part" : ""}`;
      const values = app.sides.map(() => element("b"));
      const thin = several ? number > 0 : curve.thin;
      const key = element("span", {}, several ? `${label} ` : null, values.map((value, at) => [
        element("i", { class: thin && "thin", style: filled(several ? SIDE_COLOURS[at] : curve.colour) }), several ? null : `${label} `, value, " ",
      ]).flat());
      return { ...curve, label, thin, values, key };
    });
    const plot = element("div", { class: "plot", role: "img" });
    const clock = element("div", { class: "clock", "aria-hidden": "true" });
    const holder = element("div", { class: "curve", onpointerdown: (event) => this._seek(event, holder), onpointermove: (event) => {
      if (event.buttons & 1) this._seek(event, holder);
    } }, plot, clock);
    const root = element("figure", {}, element("figcaption", { class: "legend" }, element("strong", {}, chart.title), curves.map(({ key }) => key)), holder);
    return { ...chart, curves, plot, clock, holder, root };
  }

  _seek(event, holder) {
    const { app } = this;
    const { left, width } = holder.getBoundingClientRect();
    const inside = width - CurvesPanel.LEFT - CurvesPanel.RIGHT;
    app.visitPart((event.clientX - left - CurvesPanel.LEFT) / inside);
  }

  async _load() {
    this.series = this.app.sides.map((side) => new Series(side, this.app));
    for (const chart of this.charts) await drawChart(chart.plot, () => this._figure(chart));
    this.wait.remove();
    this.root.dataset.drawn = "";
    this.app.changed();
  }

  _figure(chart) {
    const { app } = this;
    const range = [app.begin / NS.s, app.end / NS.s];
    const traces = chart.curves.flatMap((curve) => app.sides.map((side, number) => {
      const { x, y } = this.series[number][curve.series?.(side) ?? curve.name] ?? { x: [], y: [] };
      const which = app.sides.length > 1 ? `${curve.label}, ${side.name}` : curve.label;
      return {
        x, y, name: plain(which), type: "scatter", mode: "lines",
        line: {
          color: theme.colour(app.sides.length > 1 ? SIDE_COLOURS[number] : curve.colour), width: curve.thin ? 1 : 1.75,
          shape: "hv", dash: number ? "5px,2px" : "solid",
        },
        hovertemplate: chart.share ? "%{y:.1%}" : "%{y:,.4~r}",
      };
    }));
    return { traces, layout: {
      height: 150, dragmode: false, hoverlabel: { namelength: 40 },
      margin: { l: CurvesPanel.LEFT, r: CurvesPanel.RIGHT, t: 6, b: 24 },
      xaxis: { range, fixedrange: true, automargin: false, ticksuffix: " s", nticks: 6, hoverformat: ",.3f" },
      yaxis: { rangemode: "tozero", fixedrange: true, automargin: false, tickformat: chart.share ? ".0%" : "~s", nticks: 5 },
    } };
  }

  draw() {
    const { app } = this;
    const part = app.part(app.time);
    const quick = app.keeps(this);
    const sides = quick ? [] : app.sides.map((side) => ({ side, lives: Lives.of(side), row: side.row }));
    for (const { clock, curves, plot, title } of this.charts) {
      clock.style.left = `calc(${CurvesPanel.LEFT}px + (100% - ${CurvesPanel.LEFT + CurvesPanel.RIGHT}px) * ${part})`;
      if (quick) continue;
      for (const { values, now } of curves) sides.forEach((each, at) => { values[at].textContent = now(each); });
      const told = curves.map(({ label, values }) => `${label} ${values.map(({ textContent }) => textContent).join(" and ")}`);
      plot.setAttribute("aria-label", `${title} over time; at ${format.moment(app.time)}: ${told.join(", ")}`);
    }
  }
}
CurvesPanel.shared = true;
CurvesPanel.LEFT = 44; // px beside the curves
CurvesPanel.RIGHT = 10;
