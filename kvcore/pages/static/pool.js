// The pool as a map of its blocks.

/** The pool as a map of its blocks. */
class PoolPanel {
  constructor(app, side) {
    Object.assign(this, { app, side });
    this.root = element("section", { class: "panel" }, element("header", {}, element("h2", {}, "PoolPanel")));
  }

  draw() {}
}
