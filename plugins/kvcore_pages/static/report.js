// The page of a report: sections of sentences, tables and charts, as they come in its data.

const WIDE_CHART = 600; // Pixels from which names stand beside the lines, in place of a legend.
const PRINTED = 680; // Pixels across a printed page.
const LINE_HEIGHT = 14;

/** Functions that write a value of a unit. */
const UNITS = {
  s: (value) => format.duration(value * NS.s),
  "%": (value) => `${Number(value.toFixed(1))}%`,
  "": (value) => format.number(value),
};

/** Classes of paragraphs. */
const CLASSES = { warning: "warning", answer: "answer", notice: "notice", missing: "notice" };

const charts = [];

/** Return a table, folded if it is to be. Its cells are text, whatever they hold. */
function tableOf(part) {
  if (part.folded) return element("details", {}, element("summary", {}, part.caption), tableOf({ ...part, folded: false }));
  const right = new Set(part.right);
  const cell = (tag, text, place, more = {}) =>
    element(tag, { class: right.has(place) && "number", ...more }, text);
  return element(
    "div", { class: "scroll", tabindex: 0, role: "region", "aria-label": part.caption || "Table" },
    element(
      "table", {},
      part.caption ? element("caption", {}, part.caption) : null,
      element("thead", {}, element("tr", {}, part.headers.map((text, place) => cell("th", text, place, { scope: "col" })))),
      element("tbody", {}, part.rows.map((row) => element(
        "tr", {}, row.map((text, place) => (place ? cell("td", text, place) : cell("th", text, place, { scope: "row" }))),
      ))),
    ),
  );
}

/** Return the positions of ticks on a logarithmic axis: powers of ten, and what lies between. */
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const digits = decades > 4 ? [1] : decades > 1.5 ? [1, 3] : [1, 2, 3, 5, 7];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    found.push(...digits.map((digit) => digit * 10 ** power));
  }
  return found.filter((value) => value >= low / 1.05 && value <= high * 1.05);
}

/** Return the layout of an axis over `values`. */
function axisOf(axis, values) {
  const write = UNITS[axis.unit];
  const made = { title: { text: plain(axis.title), font: { size: 12 }, standoff: 8 }, exponentformat: "none", separatethousands: true };
  if (!axis.log) return { ...made, ticksuffix: { s: " s", "%": "%" }[axis.unit] ?? "" };
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const ticks = logTicks(low, high);
  return {
    ...made, type: "log", tickvals: ticks, ticktext: ticks.map(write),
    range: [Math.log10(low) - 0.03, Math.log10(high) + 0.03],
  };
}

/** Return names beside the ends of lines, moved apart where they would cover one another. */
function endLabels(lines, top, height) {
  const labels = lines.map((line) => {
    const last = line.y.findLastIndex((value) => value != null);
    const below = line.area && lines.indexOf(line) ? lines[lines.indexOf(line) - 1].y[last] : line.area ? 0 : line.y[last];
    return { line, at: (((line.y[last] + below) / 2) / top) * height };
  }).sort((one, other) => one.at - other.at);
  let free = -Infinity;
  for (const label of labels) {
    label.placed = Math.max(label.at, free);
    free = label.placed + LINE_HEIGHT;
  }
  const over = Math.max(0, free - LINE_HEIGHT - height);
  return labels.map(({ line, placed }) => ({
    xref: "paper", yref: "paper", x: 1, y: 0, xanchor: "left", yanchor: "middle", xshift: 4,
    yshift: placed - over, showarrow: false, text: plain(line.name), font: { color: theme.colour(line.colour), size: 12 },
  }));
}

/** Return traces and layout of a chart of lines, as wide as its holder. */
function linesOf(part, width) {
  const wide = width >= WIDE_CHART;
  const height = wide ? 320 : 260;
  const margin = { l: 56, r: 16, t: 8 + LINE_HEIGHT * part.marks.length, b: 44 };
  const values = part.lines.flatMap((line) => line.x);
  const highest = part.top ?? 1.08 * Math.max(...part.lines.flatMap((line) => line.y.filter((value) => value != null)));
  const top = highest > 0 && highest < Infinity ? highest : 1;
  const annotations = part.marks.map((mark, place) => ({
    x: part.x.log ? Math.log10(mark.at) : mark.at, y: 1, yref: "paper", yanchor: "bottom", yshift: place * LINE_HEIGHT,
    xanchor: part.lines.some((line) => line.x[Math.floor(line.x.length / 2)] > mark.at) ? "left" : "right",
    showarrow: false, text: plain(mark.text), font: { color: theme.colour("soft"), size: 11 },
  }));
  const inside = part.lines.some((line) => line.label_at >= 0);
  if (wide && inside) {
    for (const line of part.lines) {
      const at = line.x[line.label_at];
      annotations.push({
        x: part.x.log ? Math.log10(at) : at, y: line.y[line.label_at], xanchor: "left", yanchor: "middle", xshift: 5, showarrow: false,
        text: plain(line.name), bgcolor: theme.colour("ground"), borderpad: 1, font: { color: theme.colour(line.colour), size: 12 },
      });
    }
  } else if (wide) {
    margin.r = 24 + 7 * Math.min(28, Math.max(...part.lines.map((line) => line.name.length)));
    annotations.push(...endLabels(part.lines, top, height - margin.t - margin.b));
  }
  const traces = part.lines.map((line, place) => ({
    name: plain(line.name), x: line.x, y: line.y, type: "scatter", mode: line.points ? "lines+markers" : "lines",
    line: { color: theme.colour(line.colour), width: line.colour === "soft" ? 1 : 2, dash: line.dash, shape: line.step ? "hv" : "linear" },
    marker: { size: 5 }, connectgaps: false,
    fill: line.area ? (place ? "tonexty" : "tozeroy") : "none",
    text: line.y.map((value) => (value == null ? "" : UNITS[part.y.unit](value))),
    hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
  }));
  const yaxis = { ...axisOf(part.y, []), range: [0, top] };
  return {
    traces,
    layout: {
      height, width, margin, annotations, xaxis: axisOf(part.x, values), yaxis,
      shapes: part.marks.map(({ at }) => ({ type: "line", x0: at, x1: at, y0: 0, y1: 1, yref: "paper", line: { color: theme.colour("soft"), width: 1, dash: "dot" } })),
    },
  };
}

/** Return traces and layout of a chart of horizontal bars. */
function barsOf(part, width) {
  const names = part.names.map(plain);
  const most = Math.max(...part.series.flatMap((series) => series.values)) || 1;
  const room = 1 + (12 + 7.2 * Math.max(...part.series.flatMap((series) => series.texts.map((text) => text.length)))) / (width - 160);
  return {
    traces: part.series.map((series) => ({
      type: "bar", orientation: "h", name: plain(series.name), y: names, x: series.values, text: series.texts.map(plain),
      textposition: "outside", cliponaxis: false, marker: { color: theme.colour(series.colour) },
      hovertemplate: "%{y}: %{text}<extra>%{fullData.name}</extra>",
    })),
    layout: {
      height: 48 + part.names.length * (10 + 20 * part.series.length), width, margin: { l: 8, r: 8, t: 4, b: 8 }, barmode: "group", hovermode: "closest",
      xaxis: { range: [0, most * Math.min(room, 3)], showticklabels: false, showgrid: false, zeroline: false },
      yaxis: { autorange: "reversed", automargin: true, showgrid: false },
    },
  };
}

/** Return a chart: its heading, a sentence, a drawing, and its numbers as a table. */
function chartOf(part, make) {
  const series = part.lines ?? part.series;
  const holder = element("div", { class: "chart", role: "img", "aria-label": `${part.title}. ${part.about}` });
  const legend = element("div", { class: "legend", "aria-hidden": "true" }, series.map((line) => {
    const mark = element("i", {});
    mark.style.borderTop = `3px ${{ dash: "dashed", dot: "dotted" }[line.dash] ?? "solid"} var(--${line.colour})`;
    return element("span", {}, mark, line.name);
  }));
  const named = part.kind === "chart" || series.length > 1;
  const figure = element(
    "figure", {}, element("figcaption", {}, element("strong", {}, part.title), " ", element("span", { class: "soft" }, part.about)),
    named ? legend : null, holder,
    part.numbers ? element("details", {}, element("summary", {}, "These numbers as a table"), tableOf({ ...part.numbers, caption: part.title })) : null,
  );
  charts.push({ figure, holder, make: (width) => {
    legend.hidden = part.kind === "chart" && width >= WIDE_CHART;
    return make(part, width);
  } });
  return figure;
}

/** Return a command, or lines of a file; words of a command are not broken at their hyphens. */
function commandOf(text) {
  const words = text.split(" ").flatMap((word) => [element("span", { class: "word" }, word), " "]);
  return element("pre", {}, element("code", {}, text.includes("\n") ? text : words.slice(0, -1)));
}

/** Return the element of a part. */
function partOf(part) {
  switch (part.kind) {
    case "heading": return element("h3", {}, part.text);
    case "table": return tableOf(part);
    case "chart": return chartOf(part, linesOf);
    case "bars": return chartOf(part, barsOf);
    case "command": return commandOf(part.text);
    default: return element("p", { class: CLASSES[part.kind] }, part.text);
  }
}

/** Return a section, its headings with ids that the contents lead to. */
function sectionOf(section, contents) {
  const made = element("section", { id: section.id, "aria-labelledby": `${section.id}-title` });
  made.append(element("h2", { id: `${section.id}-title` }, section.title));
  const inner = element("ul", {});
  for (const part of section.parts) {
    const child = partOf(part);
    if (part.kind === "heading") {
      child.id = `${section.id}-${inner.childElementCount + 1}`;
      inner.append(element("li", {}, element("a", { href: `#${child.id}` }, part.text)));
    }
    made.append(child);
  }
  contents.append(element("li", {}, element("a", { href: `#${section.id}` }, section.title), inner.childElementCount ? inner : null));
  return made;
}

/** Draw every chart as wide as its place, or as the page that is printed. */
async function drawAll() {
  for (const { figure, holder, make } of charts) {
    await drawChart(holder, () => make(holder.printed ?? Math.floor(figure.clientWidth)));
  }
}

/** Return the paragraphs of a kind, of all sections, for the beginning of the page; null if there are none. */
function firstOf(sections, kind, about) {
  const found = sections.flatMap(({ id, title, parts }) => parts.filter((part) => part.kind === kind).map((part, place) => [id, place ? "" : title, part.text]));
  if (!found.length) return null;
  return element("ul", { class: `first ${kind}`, "aria-label": about }, found.map(([id, title, text]) => element(
    "li", {}, title ? element("strong", {}, element("a", { href: `#${id}` }, title), ": ") : null, text,
  )));
}

/** Show a report. */
async function showReport() {
  const { title, about, sections, command } = await readJson("report");
  const main = document.getElementById("report");
  const contents = element("ol", {});
  const made = sections.map((section) => sectionOf(section, contents));
  main.append(
    element("header", { class: "top" }, element("h1", {}, title), theme.button()),
    element("p", { class: "soft" }, about),
    element("nav", { "aria-label": "Contents" }, element("h2", {}, "Contents"), contents),
    ...made,
    element("footer", {}, element("p", { class: "soft" }, "This page holds everything it shows, and fetches nothing. It was made by:"), commandOf(command)),
  );
  const first = [firstOf(sections, "answer", "The answers"), firstOf(sections, "warning", "To be known first")];
  main.querySelector("nav").before(...first.filter(Boolean));
  document.body.dataset.ready = "";
  await drawAll();
  document.body.dataset.drawn = "";
  watchWidth();
  printLight();
}

/** Draw charts again when their place gets wider or narrower. */
function watchWidth() {
  let seen = document.body.clientWidth;
  let waiting = null;
  new ResizeObserver(() => {
    if (document.body.clientWidth === seen) return;
    seen = document.body.clientWidth;
    clearTimeout(waiting);
    waiting = setTimeout(theme.changed, 100);
  }).observe(document.body);
}

/** Print in light colours, with charts as wide as the page. */
function printLight() {
  const shown = document.documentElement.dataset;
  let chosen;
  const draw = (width) => {
    for (const { holder } of charts) holder.printed = width;
    theme.changed();
  };
  addEventListener("beforeprint", () => {
    chosen = shown.theme;
    shown.theme = "light";
    draw(PRINTED);
  });
  addEventListener("afterprint", () => {
    if (chosen) shown.theme = chosen;
    else delete shown.theme;
    draw();
  });
}

showReport();
