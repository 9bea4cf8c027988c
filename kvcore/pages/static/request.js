// The chosen request: its life, and why it missed.

/** The chosen request: its life, and why it missed. */
class RequestPanel {
  constructor(app, side) {
    Object.assign(this, { app, side });
    this.root = element("section", { class: "panel" }, element("header", {}, element("h2", {}, "RequestPanel")));
  }

  draw() {}
}
RequestPanel.shared = true;
