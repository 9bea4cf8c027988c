// The events around this time, in words.

/** The events around this time, in words. */
class LogPanel {
  constructor(app, side) {
    Object.assign(this, { app, side });
    this.root = element("section", { class: "panel" }, element("header", {}, element("h2", {}, "LogPanel")));
  }

  draw() {}
}
