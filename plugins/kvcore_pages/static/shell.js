// Shared by all pages: data, elements, numbers as text, colours, and charts.

const NS = { s: 1e9, ms: 1e6, us: 1e3, ns: 1 };

/** Return the bytes of a data block, decompressed. */
async function readBytes(name) {
  const holder = document.getElementById(`data-${name}`);
  const text = atob(holder.textContent);
  const packed = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) packed[at] = text.charCodeAt(at);
  holder.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Characters that turn around the text after them. */
const TURNING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/** Return the value of a JSON data block, each sign in it that turns text around as one that does not. */
async function readJson(name) {
  return JSON.parse(new TextDecoder().decode(await readBytes(name)).replace(TURNING, "\ufffd"));
}

/** Return a new element. Children that are no nodes become text: nothing is read as markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

/** Numbers as kvcore's tables have them. */
const format = {
  count: (value) => (Math.round(value) + 0).toLocaleString("en-US"),
  /** A number with three digits, or all before the point, as `format_number` of kvcore/units.py. */
  number(value) {
    const size = Math.abs(value);
    if (size >= 1e15) return value.toPrecision(3).replace(/\.?0+e/, "e");
    const places = size < 10 ? 2 : size < 100 ? 1 : 0;
    let text = size.toFixed(places);
    // `toFixed` rounds what lies in the middle up, Python to an even digit.
    const middle = (size * 2 ** (places + 1)) % 2 === 1;
    if (middle && Number(text.at(-1)) % 2) text = (size * (1 - 1e-12)).toFixed(places);
    text = Number(text).toLocaleString("en-US", { maximumFractionDigits: places });
    return value < 0 && text !== "0" ? `-${text}` : text;
  },
  share: (value) => (value == null ? "none" : `${(100 * value).toFixed(1)}%`),
  /** A duration in ns, as `format_seconds` of kvcore/units.py: `1.35 s`, `20 ms`. */
  duration(ns) {
    const seconds = ns / NS.s;
    for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["us", 1e6]]) {
      if (Math.abs(seconds) * factor >= 1) return `${format.number(seconds * factor)} ${unit}`;
    }
    return `${format.number(seconds * 1e9)} ns`;
  },
  /** A moment in ns: seconds with three decimals. */
  moment: (ns) => `${(Math.round(ns / NS.ms) / 1e3 + 0).toLocaleString("en-US", { minimumFractionDigits: 3, maximumFractionDigits: 3 })} s`,
  /** A noun with its number: `1 block`, `1,204 blocks`. */
  counted: (value, noun) => `${format.count(value)} ${noun}${value === 1 ? "" : "s"}`,
};

/** The colours of the theme that is shown, by their names in shell.css. */
const theme = {
  listeners: [],
  colour: (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(),
  /** Call `listener` whenever colours change. */
  onChange(listener) {
    theme.listeners.push(listener);
  },
  changed() {
    for (const listener of theme.listeners) listener();
  },
  get dark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  },
  /** Return a button that changes between light and dark. */
  button() {
    const name = () => (theme.dark ? "Light" : "Dark");
    const made = element("button", { type: "button", id: "theme", title: "Change between light and dark" }, name());
    made.addEventListener("click", () => {
      document.documentElement.dataset.theme = theme.dark ? "light" : "dark";
      theme.changed();
    });
    theme.onChange(() => { made.textContent = name(); });
    return made;
  },
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", theme.changed);

/** Return the style of an element that is filled with a colour of the theme. */
const filled = (name) => `background: var(--${name})`;

let chartsLoaded = null;

/** Return plotly.js. It is compiled when a chart is first drawn, after the page itself. */
function loadCharts() {
  chartsLoaded ??= readBytes("charts").then((source) => {
    document.head.append(element("script", {}, new TextDecoder().decode(source)));
    return window.Plotly;
  });
  return chartsLoaded;
}

/** Return text in which plotly sees no markup. */
const plain = (text) => text.replace(/[&<>]/g, (char) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[char]);

/** The layout of a chart in the style of the page; `extra` is merged over it, axes too. */
function chartLayout(extra = {}) {
  const [ink, soft, faint] = ["ink", "soft", "faint"].map(theme.colour);
  const axis = { color: soft, gridcolor: faint, zerolinecolor: faint, linecolor: faint, automargin: true };
  const layout = {
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 48, r: 12, t: 8, b: 32 }, showlegend: false, hovermode: "x unified",
    colorway: ["blue", "orange", "green", "pink", "yellow", "sky", "grey"].map(theme.colour),
    ...extra,
  };
  for (const name of new Set(["xaxis", "yaxis", ...Object.keys(extra).filter((key) => /^[xy]axis/.test(key))])) {
    layout[name] = { ...axis, ...extra[name] };
  }
  return layout;
}

const CHART_CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };

/** Draw a chart into `holder`, and again whenever the theme changes. `make` returns its traces and layout. */
async function drawChart(holder, make) {
  const plotly = await loadCharts();
  const draw = () => {
    const { traces, layout } = make();
    return plotly.react(holder, traces, chartLayout(layout), CHART_CONFIG);
  };
  theme.onChange(draw);
  await draw();
  return plotly;
}
