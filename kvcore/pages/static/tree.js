// The prefix tree: spans as bars of their length.

/** The prefix tree: spans as bars of their length. */
class TreePanel {
  constructor(app, side) {
    Object.assign(this, { app, side });
    this.root = element("section", { class: "panel" }, element("header", {}, element("h2", {}, "TreePanel")));
  }

  draw() {}
}
