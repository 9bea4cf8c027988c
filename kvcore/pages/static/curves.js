// Curves over time: occupancy, hit ratio, evictions, queue.

/** Curves over time: occupancy, hit ratio, evictions, queue. */
class CurvesPanel {
  constructor(app, side) {
    Object.assign(this, { app, side });
    this.root = element("section", { class: "panel" }, element("header", {}, element("h2", {}, "CurvesPanel")));
  }

  draw() {}
}
CurvesPanel.shared = true;
