// The pool as a map of its blocks: a cell is a block, or several where they are too many.

/** Return how a pool fits a width: cells in a row, pixels and blocks of a cell. */
function fitCells(blocks, width, most) {
  for (let each = 1; ; each *= 2) {
    const cells = Math.ceil(blocks / each);
    for (let size = 16; size >= (each === 1 ? 5 : 7); size--) {
      const columns = Math.max(1, Math.floor(width / size));
      const rows = Math.ceil(cells / columns);
      if (rows * size <= most) return { each, cells, size, columns, rows };
    }
  }
}

/** The pool as a map of its blocks. */
class PoolPanel extends BlockPanel {
  constructor(app, side) {
    super(app, side, { name: "Pool", kind: "blocks", keys: /^(Arrow|Home|End)/ });
    this.cursor = 0;
    const select = (label, names, name) =>
      element("select", {
        "aria-label": label,
        onchange: (event) => {
          this.colouring[name] = event.target.value;
          app.changed();
        },
      }, Object.entries(names).map(([value, text]) => element("option", { value }, text)));
    const modes = Object.fromEntries(this.colouring.modes().map((name) => [name, MODES[name].title]));
    this.mode = select("Colour of blocks", modes, "mode");
    this.order = select("Order of blocks", ORDERS, "order");
    this.outlines = element("input", {
      type: "checkbox",
      onchange: () => {
        this.colouring.outlines = this.outlines.checked;
        app.changed();
      },
    });
    this.legend = new BlockLegend();
    this.tiers = (side.playback.header.tiers ?? []).map(({ tier, slots }) => new TierBar(tier, slots));
    this.root = element("section", { class: "panel pool", "aria-label": this.name },
      element("header", {}, element("h2", {}, this.name), element("label", {}, "colour ", this.mode), element("label", {}, this.order),
        side.compared ? element("label", {}, this.outlines, " outline what is only here") : null),
      this.canvas, this.legend.root, this.note, this.tiers.map((tier) => tier.root));
  }

  _move(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const { size, columns, cells } = this.grid;
    const column = Math.floor((event.clientX - left) / size);
    const cell = Math.floor((event.clientY - top) / size) * columns + column;
    if (column >= columns || cell >= cells) this._leave();
    else this._enter(cell, event.clientX, event.clientY);
  }

  /** Move the cursor of the keyboard. */
  _step(key) {
    const { size, columns, cells } = this.grid;
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -cells, End: cells }[key] ?? 0;
    this.cursor = Math.max(0, Math.min(cells - 1, this.cursor + by));
    const { left, top } = this.canvas.getBoundingClientRect();
    const [column, row] = [this.cursor % columns, Math.floor(this.cursor / columns)];
    this._enter(this.cursor, left + (column + 0.5) * size, top + (row + 0.5) * size, true);
  }

  _enter(cell, x, y, aloud = false) {
    const before = this.pointer;
    this.pointer = { cell, x, y, aloud };
    this.cursor = cell;
    if (before?.cell === cell && !aloud) {
      this._card();
      return;
    }
    const life = this.life(this._block(cell));
    this.app.point({ side: this.side, request: life.request, block: life.id });
    this._card();
  }

  _choose() {
    const { request } = this.life(this._block(this.pointer.cell));
    this.app.choose(request < 0 ? null : { side: this.side, request });
  }

  /** Return the life of a block at this time. */
  life(id) {
    return new Life(this.app, this.side, id);
  }

  /** All blocks, in the order in which they are shown. */
  get _order() {
    return this.colouring.holdings(this.side).order(this.colouring.order);
  }

  /** Return the blocks of a cell, and how many of them each class has, that with most first. */
  _inside(cell) {
    const { each } = this.grid;
    const { of } = this.colouring.view(this.side);
    const blocks = this._order.subarray(cell * each, (cell + 1) * each);
    const counts = new Map();
    for (const id of blocks) counts.set(of[id], (counts.get(of[id]) ?? 0) + 1);
    return { blocks, of, counts: [...counts].sort((one, two) => two[1] - one[1]) };
  }

  /** Return the block that stands for a cell: the first of the class that most of it has. */
  _block(cell) {
    const { blocks, of, counts } = this._inside(cell);
    return blocks.find((id) => of[id] === counts[0][0]);
  }

  _card() {
    const { cell, x, y, aloud } = this.pointer;
    const lines = this.life(this._block(cell)).sentences(!this.app.playing);
    blockCard.show([...this._mixture(cell), ...lines], x, y, aloud);
  }

  /** Return the contents of a cell of several blocks as a list of one sentence; of a single block none. */
  _mixture(cell) {
    if (this.grid.each === 1) return [];
    const { blocks, counts } = this._inside(cell);
    const { classes } = this.colouring.view(this.side);
    const parts = counts.map(([kind, count]) => `${classes[kind].label}: ${count}`);
    return [`${format.counted(blocks.length, "block")}: ${parts.join("; ")}. One of them:`];
  }

  draw() {
    const { app, side, colouring } = this;
    this.mode.value = colouring.mode;
    this.order.value = colouring.order;
    this.outlines.checked = colouring.outlines;
    const view = colouring.view(side);
    const width = this.canvas.clientWidth;
    this.grid = fitCells(side.cache.blocks, width, width < 500 ? 300 : 260);
    const { context } = fitCanvas(this.canvas, this.grid.rows * this.grid.size);
    const lit = colouring.lit(side);
    const only = side.compared ? colouring.onlyHere(side) : null;
    const outlined = lit ?? (colouring.outlines ? only : null);
    if (this.grid.each === 1) this._cells(context, view, lit);
    else this._mixed(context, view, lit);
    if (outlined) this._outline(context, outlined);
    this._ring(context);
    this.legend.draw(view);
    for (const [number, bar] of this.tiers.entries()) bar.draw(side, number);
    this._say(view, only);
    if (this.pointer?.cell < this.grid.cells) this._card();
    else this._leave(); // the window is smaller now
  }

  /** Return the grid's sizes, and where a cell is in it. */
  _places() {
    const { size, columns, each } = this.grid;
    return { size, each, inner: size - 1, x: (cell) => (cell % columns) * size, y: (cell) => Math.floor(cell / columns) * size };
  }

  _cells(context, view, lit) {
    const { size, inner, x, y } = this._places();
    const order = this._order;
    const faint = theme.colour("line");
    const ground = theme.colour("ground");
    // A class at a time, since to change colours takes longer than to fill a cell.
    view.classes.forEach(({ colour, blocks }, kind) => {
      if (!blocks) return;
      context.fillStyle = colour ?? faint;
      for (let cell = 0; cell < order.length; cell++) {
        const id = order[cell];
        if (view.of[id] !== kind) continue;
        if (lit && !lit[id]) context.globalAlpha = 0.22;
        if (colour) context.fillRect(x(cell), y(cell), inner, inner);
        else context.fillRect(x(cell) + size / 2 - 1, y(cell) + size / 2 - 1, 1.5, 1.5);
        context.globalAlpha = 1;
      }
    });
    context.fillStyle = context.strokeStyle = ground;
    context.lineWidth = 1;
    const dot = Math.max(2, Math.round(inner / 3));
    context.beginPath();
    for (let cell = 0; cell < order.length; cell++) {
      const mark = view.marks[order[cell]];
      if (mark & USED) {
        context.fillRect(x(cell) + (inner - dot) / 2, y(cell) + (inner - dot) / 2, dot, dot);
      } else if (mark & PRIVATE) {
        context.moveTo(x(cell), y(cell) + inner);
        context.lineTo(x(cell) + inner, y(cell));
      }
    }
    context.stroke();
  }

  /** Cells of several blocks: in each, the classes from above, as much as they have. */
  _mixed(context, view, lit) {
    const { each, inner, x, y } = this._places();
    const order = this._order;
    const counts = new Uint32Array(view.classes.length);
    const colours = view.classes.map(({ colour }) => colour ?? theme.colour("faint"));
    for (let cell = 0; cell < this.grid.cells; cell++) {
      counts.fill(0);
      let lights = 0;
      const end = Math.min(order.length, (cell + 1) * each);
      for (let at = cell * each; at < end; at++) {
        counts[view.of[order[at]]] += 1;
        if (lit) lights += lit[order[at]];
      }
      if (lit && !lights) context.globalAlpha = 0.22;
      let top = y(cell);
      for (let kind = counts.length - 1; kind >= 0; kind--) {
        if (!counts[kind]) continue;
        const height = (inner * counts[kind]) / (end - cell * each);
        context.fillStyle = colours[kind];
        context.fillRect(x(cell), top, inner, height);
        top += height;
      }
      context.globalAlpha = 1;
    }
  }

  /** Outline cells of which at least half of the blocks have the flag. */
  _outline(context, flags) {
    const { each, inner, x, y } = this._places();
    const order = this._order;
    context.strokeStyle = theme.colour("ink");
    context.lineWidth = 1;
    for (let cell = 0; cell < this.grid.cells; cell++) {
      let found = 0;
      const end = Math.min(order.length, (cell + 1) * each);
      for (let at = cell * each; at < end; at++) found += flags[order[at]];
      if (found * 2 < end - cell * each || !found) continue;
      context.strokeRect(x(cell) + 0.5, y(cell) + 0.5, inner - 1, inner - 1);
    }
  }

  /** Ring the block under the pointer or the cursor, or one that another panel points to. */
  _ring(context) {
    const { pointed } = this.app;
    let cell = this.pointer?.cell ?? -1;
    if (cell < 0 && pointed?.side === this.side && pointed.block >= 0) {
      cell = Math.floor(this._order.indexOf(pointed.block) / this.grid.each);
    }
    if (cell < 0) return;
    const { size, x, y } = this._places();
    context.strokeStyle = theme.colour("focus");
    context.lineWidth = 2.5;
    context.strokeRect(x(cell) - 1, y(cell) - 1, size + 1, size + 1);
  }

  /** Write the map in words; for screen readers only when nothing moves. */
  _say(view, only) {
    const { grid, app, side, colouring } = this;
    const said = [
      grid.each > 1 ? `A cell is ${grid.each} blocks, and shows how many of them are what.` : "A cell is a block.",
      grid.each > 1 ? "" : "Hatched: private. Dotted: in use.",
      only ? `Only here, and not in the other pool: ${format.counted(only.reduce((sum, flag) => sum + flag, 0), "block")}.` : "",
    ];
    const lit = app.lit(side);
    if (lit >= 0) {
      const blocks = colouring.lit(side).reduce((sum, flag) => sum + flag, 0);
      said.push(`Lit: ${format.counted(blocks, "block")} of request ${shortened(side.playback.requests.id[lit])}.`);
    }
    this.note.textContent = said.filter(Boolean).join(" ");
    if (app.playing) return;
    const counts = view.classes.filter(({ blocks }) => blocks).map(({ label, blocks }) => `${label}: ${format.count(blocks)}`);
    this.canvas.setAttribute("aria-label",
      `The ${format.counted(side.cache.blocks, "block")} of the pool at ${format.moment(app.time)}, by ${MODES[colouring.mode].title}. ${counts.join("; ")}. Arrow keys go from cell to cell.`);
  }
}

/** The fill of a tier: cached blocks, and blocks of preempted sequences. */
class TierBar {
  constructor(name, slots) {
    Object.assign(this, { name, slots });
    this.bar = element("div", { class: "bar", "aria-hidden": "true" });
    this.parts = ["only", "parked"].map((part) => element("i", { class: part }));
    this.bar.append(...this.parts);
    this.text = element("span", { "data-tier": name });
    this.root = element("div", { class: "tier" }, element("b", {}, shortened(name)), this.bar, this.text);
  }

  draw(side, number) {
    const { used, parked } = side.cache.tiers[number];
    let held = 0;
    for (const blocks of parked.values()) held += blocks;
    const [only, kept] = this.parts;
    only.style.width = `${(100 * (used - held)) / this.slots}%`;
    kept.style.width = `${(100 * held) / this.slots}%`;
    const more = held ? `, ${format.count(held)} of preempted sequences` : "";
    this.text.textContent = `${format.count(used)} of ${format.counted(this.slots, "block")}${more}`;
  }
}
