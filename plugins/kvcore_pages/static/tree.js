// The prefix tree: spans as bars of their length, each beside those that it continues.
//
//   block 0        1      4          9      16        x grows with the root of the position: most
//         ┌────────┬──────┬──────────┐                prompts are short, and some are very long
//         │ span 1 │ span 2          │ row 0          a row is a leaf; a span is as high as
//         │        ├──────────┬──────┘                it has leaves
//         │        │ span 3   │ row 1
//         └────────┴──────────┘

/** A holder's bar: rows `[row, row + leaves)`. */
class Bar {
  constructor(number, holder) {
    Object.assign(this, { number, holder, row: -1, leaves: 0, blocks: holder.ids.length, below: [], above: null });
  }

  get end() {
    return this.holder.start + this.holder.ids.length;
  }

  /** Its name, which it keeps at other times. */
  get key() {
    const { span, seq } = this.holder;
    return span ? `span ${span.id}` : `sequence ${seq.id}`;
  }
}

/** Return the bars of a pool in rows, those with most blocks first; `first` are spans that come before all. */
function treeRows({ holders }, first, most) {
  const bars = holders.map((holder, number) => new Bar(number, holder)).filter(({ holder }) => holder.span || holder.seq);
  const ofSpan = new Map(bars.filter(({ holder }) => holder.span).map((bar) => [bar.holder.span, bar]));
  const tops = [];
  for (const bar of bars) {
    const { span, seq } = bar.holder;
    bar.above = ofSpan.get(span ? span.parent : seq.span) ?? null;
    (bar.above ? bar.above.below : tops).push(bar);
  }
  const rank = (list) => list.sort((one, two) =>
    first.has(two.holder.span) - first.has(one.holder.span) || two.blocks - one.blocks || one.number - two.number);
  // Holders come in tree order, so backwards each comes after what continues it.
  for (const bar of [...bars].reverse()) {
    bar.leaves = Math.max(1, bar.leaves);
    if (!bar.above) continue;
    bar.above.blocks += bar.blocks;
    bar.above.leaves += bar.leaves;
  }
  const waiting = [];
  let row = 0;
  for (const top of rank(tops)) {
    top.row = row;
    row += top.leaves;
    waiting.push(top);
  }
  const shown = [];
  while (waiting.length) {
    const bar = waiting.pop();
    if (bar.row >= most) continue;
    shown.push(bar);
    let at = bar.row;
    for (const each of rank(bar.below)) {
      each.row = at;
      at += each.leaves;
      waiting.push(each);
    }
  }
  const left = bars.filter((bar) => bar.row < 0 || bar.row >= most).reduce((sum, { holder }) => sum + holder.ids.length, 0);
  const longest = bars.reduce((end, bar) => Math.max(end, bar.end), 1);
  return { shown, rows: Math.min(row, most), leaves: row, left, longest };
}

/** The prefix tree: spans as bars of their length. */
class TreePanel extends BlockPanel {
  constructor(app, side) {
    super(app, side, { name: "Prefix tree", kind: "tree", keys: /^Arrow/ });
    this.cursor = null;
    this.room = element("div", { class: "room" });
    this.box = element("div", { class: "tree-box", onscroll: () => this.draw() }, this.canvas, this.room);
    this.root = element("section", { class: "panel", "aria-label": this.name },
      element("header", {}, element("h2", {}, this.name)), this.box, this.note);
  }

  _move(event) {
    this._enter(this._find(event), event.clientX, event.clientY);
  }

  _choose() {
    this.app.choose({ side: this.side, request: this.pointer.bar.holder.request });
  }

  _x(position) {
    return this.width * Math.sqrt(position / this.tree.longest);
  }

  /** Return the bar and position under the pointer; null if there is none. */
  _find(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const position = Math.floor(this.tree.longest * ((event.clientX - left) / this.width) ** 2);
    const row = Math.floor((event.clientY - top - TreePanel.AXIS + this.box.scrollTop) / this.high);
    const bar = event.clientY - top < TreePanel.AXIS ? null : this.tree.shown.find((each) =>
      each.row <= row && row < each.row + each.leaves && each.holder.start <= position && position < each.end);
    return bar ? { bar, at: position - bar.holder.start } : null;
  }

  /** Move the cursor to the span above, the largest below, or the next beside it. */
  _step(key) {
    const { shown } = this.tree;
    const bar = shown.find(({ key }) => key === this.cursor) ?? shown[0];
    if (!bar) return;
    const beside = (row) =>
      shown.find((each) => each.row <= row && row < each.row + each.leaves && each.holder.start <= bar.holder.start && bar.holder.start < each.end);
    const next = {
      ArrowLeft: () => bar.above, ArrowRight: () => bar.below.find((each) => each.row === bar.row),
      ArrowUp: () => beside(bar.row - 1), ArrowDown: () => beside(bar.row + bar.leaves),
    }[key]?.() ?? bar;
    this.cursor = next.key;
    const above = next.row * this.high;
    if (above < this.box.scrollTop || above + this.high > this.box.scrollTop + this.box.clientHeight - TreePanel.AXIS) {
      this.box.scrollTop = above;
    }
    const { left, top } = this.canvas.getBoundingClientRect();
    this._enter({ bar: next, at: 0 }, left + this._x(next.holder.start), top + TreePanel.AXIS + above - this.box.scrollTop, true);
  }

  _enter(found, x, y, aloud = false) {
    if (!found) {
      this._leave();
      return;
    }
    const before = this.pointer;
    this.pointer = { ...found, x, y, aloud };
    this.cursor = found.bar.key;
    const block = found.bar.holder.ids[found.at];
    if (before?.bar.holder.ids[before.at] !== block) {
      this.app.point({ side: this.side, request: found.bar.holder.request, block });
    }
    this._card();
  }

  /** Show a description of the bar under the pointer, and the life of the block there. */
  _card() {
    const { bar, at, x, y, aloud } = this.pointer;
    const { holder } = bar;
    const name = shortened(this.side.playback.requests.id[holder.request]);
    const place = `blocks ${format.count(holder.start)}–${format.count(bar.end)}`;
    const said = holder.span
      ? `${format.counted(holder.ids.length, "block")} of request ${name} (${place}): ${format.counted(holder.span.children.size, "continuation")}, ${format.counted(bar.blocks - holder.ids.length, "block")} after it`
      : `${format.counted(holder.ids.length, "private block")} of request ${name}`;
    const life = new Life(this.app, this.side, holder.ids[at]);
    blockCard.show([`${said}.`, ...life.sentences(!this.app.playing)], x, y, aloud);
  }

  draw() {
    const { app, side, colouring, box } = this;
    const view = colouring.view(side);
    const lit = colouring.lit(side);
    const chosen = app.requestOn(side, app.chosen);
    if (this.holdings !== view.holdings || this.chosen !== chosen) {
      Object.assign(this, { chosen, holdings: view.holdings });
      this.tree = treeRows(view.holdings, this._chosen(view), TreePanel.MOST);
    }
    const { rows } = this.tree;
    this.high = Math.max(13, Math.min(24, Math.floor(280 / Math.max(1, rows))));
    const whole = rows * this.high + TreePanel.AXIS;
    const height = Math.min(300, Math.max(60, whole));
    box.style.height = `${height}px`;
    this.room.style.height = `${Math.max(0, whole - height)}px`;
    const { context, width } = fitCanvas(this.canvas, height);
    this.width = width - 1;
    if (this.pointer) this._follow();
    this._bars(context, view, lit, height);
    this._axis(context);
    this._say();
  }

  /** Point to the bar that the one under the pointer is now, and to nothing if that is gone. */
  _follow() {
    const still = this.tree.shown.find(({ key }) => key === this.pointer.bar.key);
    if (still && this.pointer.at < still.holder.ids.length) {
      this.pointer.bar = still;
      this._card();
    } else this._leave();
  }

  /** Return the spans of the chosen request, which come first. */
  _chosen({ holdings }) {
    const request = this.app.requestOn(this.side, this.app.chosen);
    if (request < 0) return new Set();
    const flags = litBlocks(this.side, request);
    return new Set(holdings.holders.filter(({ span, ids }) => span && flags[ids[0]]).map(({ span }) => span));
  }

  _bars(context, view, lit, height) {
    const scrolled = this.box.scrollTop - TreePanel.AXIS;
    const [ink, ground, panel] = ["ink", "ground", "panel"].map(theme.colour);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (const bar of this.tree.shown) {
      const { holder } = bar;
      const top = bar.row * this.high - scrolled;
      const bottom = Math.min(this.tree.rows, bar.row + bar.leaves) * this.high - scrolled - 1;
      if (bottom < TreePanel.AXIS || top > height) continue;
      const [high, left] = [bottom - top, this._x(holder.start)];
      const right = Math.max(left + 1, this._x(bar.end) - 1);
      let at = 0;
      for (const [upto, kind] of view.pieces[bar.number]) {
        // What is lit may end within a piece.
        const bright = lit ? holder.ids.slice(at, upto).filter((id) => lit[id]).length : upto - at;
        for (const [end, alpha] of [[at + bright, 1], [upto, 0.22]]) {
          if (end <= at) continue;
          const [from, to] = [this._x(holder.start + at), Math.min(right, this._x(holder.start + end))];
          context.globalAlpha = alpha;
          context.fillStyle = view.classes[kind].colour;
          context.fillRect(from, top, Math.max(0.5, to - from), high);
          at = end;
        }
      }
      context.globalAlpha = 1;
      if (!holder.span) {
        context.strokeStyle = ground;
        hatch(context, left, top, right - left, high);
      }
      if (lit?.[holder.ids[0]]) {
        context.strokeStyle = ink;
        context.lineWidth = 1.5;
        context.strokeRect(left + 0.5, top + 0.5, right - left - 1, high - 1);
      }
      context.lineWidth = 1;
      this._label(context, bar, { left, right, top: Math.max(top, TreePanel.AXIS), bottom: Math.min(bottom, height) }, { ink, panel });
    }
    const { pointer } = this;
    if (!pointer) return;
    const [left, right] = [pointer.bar.holder.start, pointer.bar.end].map((position) => this._x(position));
    const last = Math.min(this.tree.rows, pointer.bar.row + pointer.bar.leaves);
    context.strokeStyle = theme.colour("focus");
    context.lineWidth = 2.5;
    context.strokeRect(left, pointer.bar.row * this.high - scrolled, right - left, (last - pointer.bar.row) * this.high - 1);
  }

  /** Write whose a bar is where there is room, on a ground of its own so that it is read on any colour. */
  _label(context, { holder }, { left, right, top, bottom }, { ink, panel }) {
    if (right - left < 26 || bottom - top < 10) return;
    const { id } = this.side.playback.requests;
    const uses = holder.span && holder.uses ? ` ● ${holder.uses}` : "";
    const name = shortened(id[holder.request]);
    const texts = [`${name}: ${format.counted(holder.ids.length, "block")}${uses}`, `${name}${uses}`, uses.trim()];
    const text = texts.find((each) => each && context.measureText(each).width + 10 < right - left);
    if (!text) return;
    const middle = (top + bottom) / 2;
    context.fillStyle = panel;
    context.fillRect(left + 2, middle - 6, context.measureText(text).width + 6, 11.5);
    context.fillStyle = ink;
    context.fillText(text, left + 5, middle);
  }

  _axis(context) {
    const { longest } = this.tree;
    context.fillStyle = theme.colour("panel");
    context.fillRect(0, 0, this.width + 1, TreePanel.AXIS);
    context.fillStyle = theme.colour("soft");
    let free = 0;
    for (let step = 1; step <= longest; step *= 10) {
      for (const position of [step === 1 ? 0 : step / 2, step, 2 * step].filter((each) => Number.isInteger(each) && each <= longest)) {
        const [at, text] = [this._x(position), position ? format.count(position) : "block 0"];
        const { width } = context.measureText(text);
        if (at < free || at + width > this.width) continue;
        context.fillRect(at, TreePanel.AXIS - 4, 1, 4);
        context.fillText(text, at + 3, TreePanel.AXIS / 2);
        free = at + width + 12;
      }
    }
  }

  _say() {
    const { tree, app, side } = this;
    const more = tree.leaves - tree.rows;
    const said = !tree.shown.length ? "Nothing is cached yet." : [
      `${format.counted(tree.leaves, "row")}, those with most blocks first. Bars are coloured by ${MODES[this.colouring.mode].title}, as in the pool; the scale is of square roots. ● : sequences that use it. Hatched: private.`,
      more ? `Not shown: the last ${format.counted(more, "row")}, with ${format.counted(tree.left, "block")}.` : "",
    ].filter(Boolean).join(" ");
    this.note.textContent = said;
    if (app.playing) return;
    const largest = tree.shown.filter(({ above }) => !above).slice(0, 5).map(({ holder, blocks }) =>
      `${format.counted(blocks, "block")} from request ${shortened(side.playback.requests.id[holder.request])} on`);
    this.canvas.setAttribute("aria-label",
      `${format.counted(side.cache.spans.size, "span")} with ${format.counted(side.cache.cached, "block")} at ${format.moment(app.time)}, in ${format.counted(tree.leaves, "row")}. ${largest.join("; ")}. Arrow keys go from span to span.`);
  }
}
TreePanel.AXIS = 18;
TreePanel.MOST = 400;
