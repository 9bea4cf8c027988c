// The chosen request: its life, its blocks now, and why it missed.

/** The chosen request: its life, and why it missed. */
class RequestPanel {
  constructor(app) {
    Object.assign(this, { app, drawn: null });
    this.options = element("datalist", { id: "requests" });
    this.field = element("input", {
      id: "request", list: "requests", autocomplete: "off", size: 12, "aria-label": "Request to choose, by its id",
      oninput: () => this._offer(), onfocus: () => this._offer(), onchange: () => this._choose(this.field.value),
    });
    this.clear = element("button", { type: "button", onclick: () => app.choose(null) }, "Choose none");
    this.cards = element("div", { class: "sides" });
    this.root = element("section", { class: "panel", id: "request-panel", "aria-label": "The chosen request" },
      element("header", {}, element("h2", {}, "Request"), element("label", {}, "id ", this.field), this.options, this.clear), this.cards);
  }

  /** Offer ids that begin with the typed text. */
  _offer() {
    const found = [];
    for (const { playback } of this.app.sides) {
      for (const id of playback.requests.id) {
        if (found.length >= RequestPanel.OFFERED) break;
        if (id.startsWith(this.field.value) && !found.includes(id)) found.push(id);
      }
    }
    this.options.replaceChildren(...found.map((id) => element("option", { value: id })));
  }

  _choose(id) {
    const side = this.app.sides.find(({ byId }) => byId.has(id));
    this.field.setCustomValidity(side || !id ? "" : "No request has this id.");
    this.field.reportValidity();
    if (side) this.app.choose({ side, request: side.byId.get(id) });
  }

  draw() {
    const { app } = this;
    const { chosen } = app;
    const id = chosen && chosen.side.playback.requests.id[chosen.request];
    if (id !== this.drawn) {
      this.drawn = id;
      if (document.activeElement !== this.field || id) this.field.value = id ?? "";
      this.cards.replaceChildren(...(chosen ? app.sides.map((side) => this._card(side)) : [element("p", { class: "soft" },
        "None is chosen. Press one anywhere on the page, or type its id: then this tells its life, its blocks, and why it missed.")]));
      this.drawnAt = null;
    }
    this.clear.hidden = !chosen;
    if (!chosen || app.keeps(this)) return;
    app.sides.forEach((side, number) => {
      const request = app.requestOn(side, chosen);
      const holder = this.cards.children[number].querySelector(".now-here");
      if (holder && request >= 0) holder.textContent = this._now(side, request);
    });
  }

  /** Return the card of the chosen request on a side. */
  _card(side) {
    const { app } = this;
    const { requests, header } = side.playback;
    const request = app.requestOn(side, app.chosen);
    const title = app.sides.length > 1 ? element("h3", {}, side.name) : null;
    if (request < 0) return element("div", { class: "life" }, title, element("p", { class: "soft" }, "This trace has no such request."));
    const lookup = requests.lookup[request];
    const facts = [
      ...this._life(side, request),
      ["prompt", [`${format.counted(requests.tokens[request], "token")}, ${format.counted(lookup, "block")} of ${format.count(header.block_size)} looked up`]],
      ["hit", [`${format.counted(requests.hit[request], "block")}; the optimum hits ${format.count(requests.optimum[request])}`, this._elsewhere(side, request)]],
    ];
    return element("div", { class: "life" }, title,
      element("dl", {}, facts.flatMap(([name, told]) => [element("dt", {}, name), element("dd", {}, told)])),
      element("p", { class: "now-here", role: "status" }),
      element("h3", {}, "Why it missed"),
      element("div", { class: "why", id: `why-${side.number}` }, this._why(side, side.playback.why(request))));
  }

  /** Return the hits of the request on the other side. */
  _elsewhere(side, request) {
    const other = this.app.sides.find((each) => each !== side);
    if (!other) return null;
    const there = this.app.requestOn(other, { side, request });
    return there < 0 ? null : `; in ${other.name} it hit ${format.count(other.playback.requests.hit[there])}`;
  }

  /** Return the moments of a request, by name. */
  _life(side, request) {
    const { app } = this;
    const { times, requests } = side.playback;
    const lives = Lives.of(side);
    const go = (row) => rowButton(app, side, row, "ref");
    const [arrived, admitted, first, finished] = ["arrived", "admitted", "first", "finished"].map((name) => lives[name][request]);
    const after = (row, since) => (since >= 0 ? [go(row), ` after ${format.duration(times[row] - times[since])}`] : [go(row)]);
    const found = lives.earlier.has(request) ? [["arrived", ["before the lines that are here"]]] : [];
    const output = format.counted(requests.output[request], "token");
    if (arrived >= 0) found.push(["arrived", [go(arrived)]]);
    if (lives.rejected[request] >= 0) found.push(["turned away", [go(lives.rejected[request])]]);
    const before = requests.admitted[request] >= 0 && requests.admitted[request] < side.playback.about.first;
    if (before) found.push(["admitted", [format.moment(requests.when[request])]]);
    else if (admitted >= 0) found.push(["admitted", after(admitted, arrived)]);
    if (lives.untimed) return [...found, ["served", ["at once: this run has no clock"]]];
    if (first >= 0) found.push(["first token", after(first, arrived)]);
    found.push(["finished", finished >= 0 ? [...after(finished, arrived), `; ${output}`] : [`not in this trace; ${output} asked for`]]);
    return found;
  }

  /** Return the phase of a request at this time, and the places of its blocks. */
  _now(side, request) {
    const { cache, row, playback } = side;
    const lives = Lives.of(side);
    const phase = lives.phaseAt(request, Math.max(0, row));
    const open = [...cache.sequences.values()].filter((seq) => seq.request === request);
    const coming = lives.begins[request] < 0 ? !lives.earlier.has(request) : lives.begins[request] > row;
    const doing = phase >= 0 ? `is ${{ queued: "queued", loading: "loading from a tier", prefill: "in prefill", decode: "decoding", preempted: "preempted" }[PHASES[phase]]}`
      : coming ? "has not arrived" : "is gone";
    const held = open.map((seq) => playback.header.cache_groups
      ? `${format.counted(seq.ids.length, "block")} of its own`
      : `${format.counted(seq.span?.end ?? 0, "cached block")} and ${format.count(seq.ids.length)} of its own`);
    const holds = held.length ? `; it holds ${held.join(", and ")}` : "";
    // Without those that it generates, and what its last key covers beyond it.
    const blocks = Math.min(playback.requests.blocks[request], Math.ceil(playback.requests.tokens[request] / playback.header.block_size));
    const cached = this._cached(side, request, blocks);
    return `Now it ${doing}${holds}. Of the ${format.counted(blocks, "block")} of its prompt ${format.count(cached)} ${cached === 1 ? "is" : "are"} cached.`;
  }

  /** Return how many blocks of a prompt are cached. */
  _cached(side, request, blocks) {
    const { held } = side;
    let found = 0;
    for (const piece of side.piecesOn(side, request, 0, blocks, side.playback.main)) {
      for (const [first, end] of held.parts(piece)) found += end - first;
    }
    return Math.round(found);
  }

  /** Return lines of `kvcore explain`, in which requests and times can be pressed. */
  _why(side, why) {
    if (why == null) return element("p", { class: "soft" }, "The trace does not tell.");
    return why.split("\n").map((line) => element("p", { class: line.startsWith("- ") && "item" }, this._linked(side, line)));
  }

  /** Return a line as text and buttons. */
  _linked(side, line) {
    const { app } = this;
    const nodes = [];
    let done = 0;
    for (const match of line.matchAll(/(equest )(\S+)|\b((?:at|from|to) )(\d+(?:\.\d+)?) (s|ms|us|ns)\b/g)) {
      const [, noun, id, word, number, unit] = match;
      let node = null;
      if (noun) {
        let known = id;
        while (known && !side.byId.has(known)) known = /[.,:;)]$/.test(known) ? known.slice(0, -1) : "";
        if (known) node = requestButton(app, side, side.byId.get(known), known);
      } else {
        // What is told is rounded: go to the end of what it can be.
        const half = 0.5 * 10 ** -(number.split(".")[1]?.length ?? 0) * (number.includes(".") ? 1 : 0);
        const time = (Number(number) + half) * NS[unit];
        node = element("button", { type: "button", class: "ref", title: "Go to this time", onclick: () => {
          app.play(false);
          app.seek(time);
        } }, `${number} ${unit}`);
      }
      if (!node) continue;
      const from = match.index + (noun ?? word).length;
      nodes.push(line.slice(done, from), node);
      done = from + node.textContent.length;
    }
    nodes.push(line.slice(done));
    return nodes;
  }
}
RequestPanel.shared = true;
RequestPanel.OFFERED = 12;
