// Part 2 of the tour: growth, and the calculator.

const GIB = 2 ** 30;

/** Part 2: K/V by layer and head, a token a step. */
function growthPicture(data) {
  const [, dense, paged] = data.caches;
  const capacity = data.prompt + data.output - 1;
  const names = [];
  for (let layer = 1; layer <= data.layers; layer += 1) {
    for (let head = 1; head <= data.kv_heads; head += 1) names.push([layer, head]);
  }
  const cells = names.map(() => Array.from({ length: capacity }, () => element("td")));
  const table = element(
    "table", { class: "grid" },
    element("caption", { class: "hidden" }, "K/V of each token, by layer and K/V head"),
    element("thead", {}, element("tr", {}, element("th", {}, ""), Array.from({ length: capacity }, (_, token) => element("th", { scope: "col" }, token + 1)))),
    element("tbody", {}, cells.map((row, index) => element("tr", {}, element("th", { scope: "row", title: `layer ${names[index][0]}, K/V head ${names[index][1]}` }, `L${names[index][0]}·H${names[index][1]}`), row))),
  );
  const facts = factList(["tokens", "blocks", "paged cache", "dense cache"]);
  const each = 2 * data.layers * data.kv_heads * data.head_dim * data.number_bytes;
  const blockBytes = each * data.block_size;
  const draw = (step) => {
    const tokens = data.prompt + step;
    const room = paged.kv_bytes[step] / each;
    cells.forEach((row) => row.forEach((cell, token) => {
      const held = token < tokens;
      const kind = held ? "computed" : token < room ? "slot hatched" : "none";
      cell.className = `${kind}${held && token >= tokens - paged.projections[step] ? " now" : ""}`;
      const text = held ? "K/V" : token < room ? "reserved" : "";
      cell.replaceChildren(element("span", { "aria-hidden": "true" }, held ? "●" : ""), element("span", { class: "hidden" }, text));
    }));
    facts.set("tokens", tokens);
    facts.set("blocks", `${paged.kv_bytes[step] / blockBytes} of ${data.block_size} tokens each`);
    facts.set("paged cache", bytesText(paged.kv_bytes[step]));
    facts.set("dense cache", `${bytesText(dense.kv_bytes[step])}, reserved in step 1`);
  };
  return {
    stage: [
      element("div", {}, element("h3", {}, `A small model: ${data.layers} layers (L), ${data.kv_heads} K/V heads (H) in each`), table),
      element("div", {}, facts.list, legend([[sign("computed", "●"), "a key and a value"], [sign("slot hatched", ""), "in a block that is not full yet"]])),
    ],
    count: data.output,
    draw,
    say(step) {
      const tokens = data.prompt + step;
      const full = step > 0 && paged.kv_bytes[step] > paged.kv_bytes[step - 1];
      const start = step === 0 ? `The prompt has ${tokens} tokens.` : "One token more.";
      const why = full ? " No block has room for it, so the paged cache takes another one." : "";
      return `${start}${why} A token takes 2 (key and value) × ${data.layers} layers × ${data.kv_heads} heads × ${data.head_dim} numbers × ${data.number_bytes} bytes = ${bytesText(each)}, so ${format.counted(tokens, "token")} take ${bytesText(tokens * each)}; in whole blocks it is ${bytesText(paged.kv_bytes[step])}.`;
    },
  };
}

/** The arithmetic of `kvcore size`, on the numbers of its catalogue. Whole bytes, exact. */
class Sizes {
  constructor(data) {
    this.data = data;
  }

  /** Return the sizes of a model's K/V by codec, for requests of some tokens; null if it cannot be coded. */
  of(modelName, codec, tokens) {
    const model = this.data.models[modelName];
    const layout = model.codecs[codec];
    if (layout === null) return null;
    const size = this.data.block_size;
    const layerBytes = layout.block_bytes / model.layers;
    let request = 0;
    for (const [window, layers] of model.windows) {
      const kept = window === null ? tokens : Math.min(tokens, window);
      request += layers * layerBytes * Math.ceil(kept / size);
    }
    return { token: Math.ceil(layout.block_bytes / size), block: layout.block_bytes, request, staged: layout.staged_bytes, weights: model.weight_bytes };
  }

  /** Return the memory for K/V on a device, and the number of such requests that fit. */
  fit(sizes, device) {
    const memory = this.data.devices[device];
    const reserve = Math.floor(memory / 10);
    const budget = memory - sizes.weights - reserve;
    const requests = Math.floor(Math.max(0, budget) / (sizes.request + sizes.staged));
    return { memory, reserve, budget, requests };
  }
}

/** Show how K/V grows with the text: in a table, and in a chart once that comes near. */
function growthChart(sizes, holder, table) {
  const points = Array.from({ length: 65 }, (_, index) => index * 2048);
  const curves = sizes.data.curves.map((name) => ({ name, model: sizes.data.models[name], bytes: points.map((tokens) => (tokens ? sizes.of(name, "fp16", tokens).request : 0)) }));
  const about = ({ attention, windows, query_heads: queries, kv_heads: heads, latent }) => {
    if (latent) return `MLA: ${latent} numbers a token and layer`;
    const kind = `${attention}: ${heads} K/V heads for ${queries} query heads`;
    return windows[0][0] === null ? kind : `${kind}, window of ${format.count(windows[0][0])}`;
  };
  const short = ({ attention, windows }) => (windows[0][0] === null ? attention : "window");
  const row = ({ name, model }) => {
    const at = (tokens) => sizes.of(name, "fp16", tokens);
    return element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "wide-only" }, about(model)), [bytesText(at(1).token), bytesText(at(8192).request), bytesText(at(131072).request)].map((text) => element("td", { class: "number" }, text)));
  };
  table.append(
    element("caption", { class: "hidden" }, "K/V of one text in fp16, by model"),
    element("thead", {}, element("tr", {}, ["model", "attention"].map((text) => element("th", { scope: "col", class: text === "attention" ? "wide-only" : null }, text)), ["a token", "8,192 tokens", "131,072 tokens"].map((text) => element("th", { scope: "col", class: "number" }, text)))),
    element("tbody", {}, curves.map(row)),
  );
  const colours = ["orange", "blue", "pink", "green"];
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const draw = () => drawChart(holder, () => ({
    traces: curves.map(({ name, bytes }, index) => ({
      x: points, y: bytes.map((size) => size / GIB), name, mode: "lines", hovertemplate: `${name}: %{y:.3g} GiB<extra></extra>`,
      line: { color: theme.colour(colours[index]), dash: dashes[index], width: 3 },
    })),
    layout: {
      xaxis: { title: { text: "tokens of the text" }, range: [0, 131072], tickvals: [0, 32768, 65536, 98304, 131072], tickformat: "," },
      yaxis: { title: { text: "K/V in fp16 (GiB)" }, rangemode: "tozero" },
      margin: { l: 52, r: 14, t: 12, b: 44 },
      annotations: curves.map(({ name, model, bytes }, index) => ({
        x: points[index ? 64 : 51], y: bytes[index ? 64 : 51] / GIB, text: `${name} (${short(model)})`, showarrow: false, xanchor: "right", yanchor: "bottom",
        yshift: 2, xshift: index ? 0 : -14, bgcolor: theme.colour("ground"), borderpad: 0, font: { color: theme.colour(colours[index]), size: 12 },
      })),
    },
  }));
  // The library is compiled when its only chart comes near, and not before the page can be used.
  const watcher = new IntersectionObserver((seen) => {
    if (!seen.some((each) => each.isIntersecting)) return;
    watcher.disconnect();
    draw();
  }, { rootMargin: "400px" });
  watcher.observe(holder);
}

/** Draw the calculator: what fits for a model, codec, GPU, length and batch. */
function calculator(sizes, root) {
  const data = sizes.data;
  const choice = (id, label, names, value, groups = null) => {
    const option = (name) => element("option", { value: name, selected: name === value }, name);
    const select = element("select", { id, onchange: () => update() }, groups
      ? groups.map((group) => element("optgroup", { label: group }, names.filter((name) => data.models[name].attention === group).map(option)))
      : names.map(option));
    return { select, holder: element("label", {}, label, select) };
  };
  const amount = (id, label, value, most) => {
    const number = element("input", { id, type: "number", min: 1, max: most, step: 1, value, oninput: () => update() });
    const range = element("input", {
      type: "range", min: 0, max: Math.log2(most), step: 0.5, value: Math.log2(value), "aria-label": `${label}, slider`,
      oninput: () => { number.value = Math.round(2 ** Number(range.value)); update(); },
    });
    const read = () => {
      const typed = Math.min(most, Math.max(1, Math.floor(Number(number.value) || 1)));
      range.value = Math.log2(typed);
      return typed;
    };
    return { read, holder: element("label", {}, label, element("span", { class: "pair" }, range, number)) };
  };
  const kinds = [...new Set(Object.values(data.models).map((model) => model.attention))].sort();
  const model = choice("calc-model", "Model", Object.keys(data.models), "llama-3.1-8b", kinds);
  const codec = choice("calc-codec", "K/V kept as (codec)", data.codecs, "fp16");
  const device = choice("calc-device", "GPU", Object.keys(data.devices).sort((a, b) => data.devices[a] - data.devices[b]), "a100-40g");
  for (const option of device.select.options) option.textContent += `, ${data.devices[option.value] / 1e9} GB`;
  const tokens = amount("calc-tokens", "Tokens of a request", 8192, 2 ** 21);
  const batch = amount("calc-batch", "Requests at a time (batch)", 16, 512);
  const bar = element("div", { class: "memory-bar", "aria-hidden": "true" });
  const verdict = element("p", { class: "verdict", "aria-live": "polite", id: "calc-verdict" });
  const amounts = element("table", { class: "amounts" });
  const command = element("p", { class: "command soft" });
  root.append(model.holder, codec.holder, device.holder, tokens.holder, batch.holder, element("div", { class: "wide" }, bar, verdict, element("div", { class: "scroll" }, amounts), command));

  const shown = (rows) => amounts.replaceChildren(element("tbody", {}, rows.map(([id, name, value, text]) =>
    element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "number", id, "data-value": value }, text ?? bytesText(value))))));
  const part = (name, size, all, text) => element("span", { class: name, style: `flex: ${Math.max(0, size)} 1 0`, title: `${text}: ${bytesText(size)}` }, size / all > 0.09 ? text : "");

  function update() {
    const [length, count] = [tokens.read(), batch.read()];
    const names = [model.select.value, codec.select.value, device.select.value];
    const found = sizes.of(names[0], names[1], length);
    command.replaceChildren("The same by ", element("code", {}, `kvcore size ${names[0]} --codec ${names[1]} --device ${names[2]} --tokens ${length} --batch ${count}`));
    if (found === null) {
      bar.replaceChildren();
      shown([]);
      verdict.textContent = `${names[1]} cannot code the heads of ${names[0]}: their width is no multiple of its groups.`;
      return;
    }
    const { memory, reserve, budget, requests } = sizes.fit(found, names[2]);
    const wanted = count * found.request;
    shown([
      ["calc-token", "K/V of a token", found.token],
      ["calc-request", `K/V of a request of ${format.counted(length, "token")}`, found.request],
      ["calc-wanted", `K/V of a batch of ${format.count(count)}`, wanted],
      ["calc-weights", "weights", found.weights],
      ["calc-budget", budget < 0 ? "missing: the weights do not fit" : "left for K/V", budget, bytesText(Math.abs(budget))],
      ["calc-requests", "requests that fit", requests, format.count(requests)],
    ]);
    const all = Math.max(memory, found.weights + wanted + reserve);
    const fits = budget >= 0 && count <= requests;
    bar.replaceChildren(
      part("weights hatched", found.weights, all, "weights"),
      part(fits ? "kv" : "kv over", wanted, all, fits ? "K/V" : "K/V: too much"),
      part("room", all - found.weights - wanted - reserve, all, "free"),
      part("reserve", reserve, all, "kept free"),
    );
    const per = `${format.counted(requests, "request")} of ${format.counted(length, "token")}`;
    if (budget < 0) verdict.textContent = `The weights alone take ${bytesText(found.weights)}: ${names[0]} needs a larger GPU, or several.`;
    else if (fits) verdict.textContent = `It fits: up to ${per} at a time.`;
    else verdict.textContent = `It does not fit: there is room for ${per} at a time, not for ${format.count(count)}. Shorter texts, a smaller codec, or fewer K/V heads would help.`;
  }
  update();
}
