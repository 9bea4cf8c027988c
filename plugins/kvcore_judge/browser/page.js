// The page: an editor, what the policy is run on, and the result. Python runs in worker.js.
//
// What the worker sends is data, never markup: the policy in it may be anybody's.

const at = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const OWN = "policy.py";
const WIDTH = 300, HEIGHT = 170, MARGIN = 28;

let worker = null, script = null, ready = false, running = false;
// The file that was dropped, and the one that Python has.
let dropped = null, kept = null;

function made(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function drawn(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// The state of the page: loading, ready, running.

function say(text, done = null, total = null) {
  at("state").textContent = text;
  at("progress").hidden = !total;
  if (total) at("progress").value = done / total;
}

function enable() {
  at("run").disabled = !ready || running;
  at("stop").disabled = !running;
  document.body.dataset.state = running ? "running" : ready ? "ready" : "loading";
}

function fail(text) {
  at("error").textContent = text;
  at("error").hidden = !text;
}

async function text(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} cannot be loaded: ${response.status}`);
  return response.text();
}

// A worker from a blob has the content policy of this page, so that a policy fetches nothing from
// elsewhere, whatever the server of these files allows.
async function start() {
  ready = running = false;
  kept = null;
  enable();
  say("Loading Python and kvcore, about 15 MB at the first visit.");
  try {
    script ??= await text("worker.js");
  } catch (error) {
    return hear.broken({ text: error.message });
  }
  const place = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  worker = new Worker(place, { type: "module" });
  worker.onmessage = ({ data }) => hear[data.kind](data);
  worker.onerror = (event) => hear.broken({ text: event.message || "the worker cannot be started" });
  worker.postMessage({ kind: "load", base: new URL(".", location.href).href, wheel: document.body.dataset.wheel });
}

const hear = {
  ready() {
    ready = true;
    say(running ? "Running." : "Ready.");
    enable();
  },
  progress({ text, done, total }) {
    say(`${text}: ${done} of ${total}`, done, total);
  },
  result({ result, seconds }) {
    running = false;
    say(result.error ? "There is no result." : `Done in ${seconds.toFixed(1)} s.`);
    fail(result.error ?? "");
    if (!result.error) show(result);
    enable();
  },
  broken({ text }) {
    running = false;
    ready = true; // for the next run, which starts Python again
    say("Python has ended; it is started again at the next run.");
    fail(text);
    worker?.terminate();
    worker = null;
    enable();
  },
};

async function run() {
  fail("");
  at("result").replaceChildren();
  const { value, validity } = at("limit");
  const limited = !at("limiting").hidden;
  if (limited && !validity.valid) return fail("Requests: give a whole number from 1 on, or nothing for all of them.");
  if (worker === null) await start();
  if (worker === null) return;
  running = true;
  enable();
  if (ready) say("Running.");
  const choice = at("choice").value;
  // A file is sent once: Python keeps it, and what it has found of it.
  if (!choice && kept !== dropped) {
    worker.postMessage({ kind: "keep", ...dropped });
    kept = dropped;
  }
  const limit = limited && value !== "" ? Number(value) : null;
  worker.postMessage({ kind: "run", source: at("policy").value, choice, limit });
}

// Python cannot be interrupted from here: it is started again.
function stop() {
  worker.terminate();
  start();
}

// The result.

function table({ title, headers, rows }) {
  const numbers = (index) => (index ? { class: "number" } : {});
  const own = (cells) => (cells[0] === OWN ? { class: "own" } : {});
  const line = (cells, name) => made("tr", own(cells), ...cells.map((cell, index) => made(name, numbers(index), cell)));
  return [
    made("h2", {}, title),
    made("div", { class: "scroll" }, made("table", {},
      made("thead", {}, line(headers, "th")), made("tbody", {}, ...rows.map((row) => line(row, "td"))))),
  ];
}

function picture({ label, sizes, lines }) {
  const top = Math.max(...Object.values(lines).flat()) || 1;
  const across = (index) => MARGIN + (index * (WIDTH - 2 * MARGIN)) / Math.max(sizes.length - 1, 1);
  const up = (value) => HEIGHT - MARGIN - ((HEIGHT - 2 * MARGIN) * value) / top;
  const image = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const legend = made("div", { class: "legend" });
  Object.entries(lines).forEach(([name, values], index) => {
    const kind = name === "optimum" ? "optimum" : `l${index}`;
    const points = values.map((value, place) => `${across(place).toFixed(1)},${up(value).toFixed(1)}`).join(" ");
    image.append(drawn("polyline", { class: kind, points }));
    legend.append(made("span", { class: kind }, made("i"), name));
  });
  sizes.forEach((size, index) => {
    const tick = drawn("text", { x: across(index), y: HEIGHT - 8 });
    tick.textContent = size;
    image.append(tick);
  });
  return made("figure", {}, made("figcaption", {}, label), legend, image);
}

function download(name, content) {
  const place = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  made("a", { href: place, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(place), 60_000);
}

function show({ headline, digest, tables, curves, reading, document: board }) {
  const [score, ...others] = tables;
  const save = made("button", {}, "Save leaderboard.json");
  save.addEventListener("click", () => download("leaderboard.json", board));
  at("result").replaceChildren(
    ...table(score),
    made("p", { class: "soft" }, headline),
    ...curves.map(picture),
    ...others.flatMap(table),
    ...reading.split("\n").map((text) => made("p", { class: "soft" }, text)),
    made("p", { class: "soft" }, `The source of ${OWN} has the digest ${digest}, here and in `,
      made("code", {}, "kvcore leaderboard"), "."),
    save,
  );
  at("result").querySelector("table").scrollIntoView({ block: "nearest" });
}

// A link: the policy and the options, after the #, which browsers do not send.

const toText = (value) => {
  const bytes = new TextEncoder().encode(JSON.stringify(value));
  const text = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
};

const fromText = (text) => {
  const bytes = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return JSON.parse(new TextDecoder().decode(Uint8Array.from(bytes, (letter) => letter.charCodeAt(0))));
};

async function share() {
  const given = { policy: at("policy").value, choice: at("choice").value || "quick", limit: at("limit").value };
  history.replaceState(null, "", `#${toText(given)}`);
  try {
    await navigator.clipboard.writeText(location.href);
    say("Copied: the link is the address of this page now.");
  } catch {
    say("The link is the address of this page now.");
  }
}

function follow() {
  if (location.hash.length < 2) return;
  try {
    const { policy, choice, limit } = fromText(location.hash.slice(1));
    if (![policy, choice, limit].every((each) => typeof each === "string")) throw new TypeError("not a link");
    at("policy").value = policy;
    at("choice").value = [...at("choice").options].some((each) => each.value === choice) ? choice : "quick";
    at("limit").value = limit;
    at("linked").hidden = false;
  } catch {
    fail("The part of the address after # is no link that this page has made; the policy is the page's own.");
  }
  choose();
}

// What the policy is run on.

function choose() {
  at("limiting").hidden = ["quick", "public"].includes(at("choice").value);
}

async function take(file) {
  if (!file) return;
  const { name, size, lastModified } = file;
  const same = dropped && dropped.name === name && dropped.size === size && dropped.lastModified === lastModified;
  if (!same) dropped = { name, size, lastModified, data: await file.arrayBuffer() };
  const own = at("choice").querySelector('option[value=""]');
  own.hidden = false;
  own.textContent = `your file: ${file.name}`;
  at("choice").value = "";
  choose();
}

at("run").addEventListener("click", run);
at("stop").addEventListener("click", stop);
at("share").addEventListener("click", share);
at("save").addEventListener("click", () => download(OWN, at("policy").value));
at("choice").addEventListener("change", choose);
at("file").addEventListener("change", () => take(at("file").files[0]));
addEventListener("hashchange", follow);
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
addEventListener("dragleave", () => document.body.classList.remove("dropping"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  take(event.dataTransfer.files[0]);
});

choose();
follow();
enable();
if (location.protocol === "file:") {
  say("");
  fail("A browser loads Python from a server alone. In this folder, `python -m http.server` is one.");
} else {
  // All files are kept first, and then loaded from there: each is fetched once.
  try {
    await navigator.serviceWorker.register("offline.js");
    await navigator.serviceWorker.ready;
  } catch {
    // The site is served without https: it works, but not offline.
  }
  await start();
}
