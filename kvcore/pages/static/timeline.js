// The serving timeline: one row a sequence.

/** The serving timeline: one row a sequence. */
class TimelinePanel {
  constructor(app, side) {
    Object.assign(this, { app, side });
    this.root = element("section", { class: "panel" }, element("header", {}, element("h2", {}, "TimelinePanel")));
  }

  draw() {}
}
