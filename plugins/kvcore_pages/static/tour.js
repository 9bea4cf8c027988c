// The tour: six pictures, each stepped through by the same player, and a calculator.

const HUES = { A: "blue", "A2": "sky", B: "orange", C: "pink", P: "blue", D: "orange", E: "green", F: "pink", G: "yellow" };
const SPEEDS = [["slow", 3000], ["normal", 1600], ["fast", 700]];

/** Return bytes with three digits and a binary unit, as kvcore's tables have them. */
function bytesText(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (power < units.length - 1 && Math.abs(size) >= 1024 ** (power + 1)) power += 1;
  return `${format.number(size / 1024 ** power)} ${units[power]}`;
}

/** Return words as a list: `a, b and c`. */
const listed = (words) => (words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : `${words[0]}`);

/** Return the colour of a name as the style of an element. */
const hue = (name) => `--hue: var(--${HUES[name] ?? "grey"})`;

/** Return a letter in a box of its colour. */
const badge = (name) => element("b", { class: "badge", style: hue(name) }, name);

/** Return a definition list of facts, whose values are set with `set(name, text)`. */
function factList(names) {
  const values = new Map(names.map((name) => [name, element("dd")]));
  const list = element("dl", { class: "facts" }, names.map((name) => [element("dt", {}, name), values.get(name)]).flat());
  return { list, set: (name, text) => { values.get(name).textContent = text; } };
}

/** Return a legend: pairs of an element that shows a state, and what it means. */
const legend = (pairs) =>
  element("div", { class: "legend" }, pairs.map(([sign, text]) => element("span", {}, sign, ` ${text}`)));

/** Return a cell of the legend with a class and a sign. */
const sign = (name, text) => element("i", { class: name, "aria-hidden": "true" }, text);

/**
 * Plays a picture step by step. A picture has `stage` (an element), `count` (of steps), `draw(step)`,
 * `say(step)` (a sentence), and perhaps `line(step)`, the line of the trace behind the step.
 */
class Player {
  constructor(root, label, picture) {
    this.root = root;
    this.picture = picture;
    this.step = 0;
    this.timer = null;
    this.pace = SPEEDS[1][1];
    const button = (text, name, act) => element("button", { type: "button", class: name, onclick: act }, text);
    this.playButton = button("Play", "play", () => this.toggle());
    this.range = element("input", {
      type: "range", min: 0, max: picture.count - 1, value: 0, "aria-label": `${label}: step`,
      oninput: () => { this.pause(); this.show(Number(this.range.value)); },
    });
    this.counter = element("span", { class: "count" });
    this.sentence = element("p", { class: "say", "aria-live": "polite" });
    this.code = element("code");
    // On a phone the sentence is short until it is asked for, so that the picture is seen.
    const more = button("More", "more", () => {
      const open = this.sentence.classList.toggle("open");
      more.textContent = open ? "Less" : "More";
      more.setAttribute("aria-expanded", open);
    });
    more.setAttribute("aria-expanded", false);
    const speed = element(
      "select",
      { "aria-label": `${label}: speed`, onchange: () => { this.pace = Number(speed.value); this.restart(); } },
      SPEEDS.map(([name, pace]) => element("option", { value: pace, selected: pace === this.pace }, name)),
    );
    root.setAttribute("role", "group");
    root.setAttribute("tabindex", "0");
    root.setAttribute("aria-label", `${label}. Space plays and pauses, arrow keys step.`);
    root.append(
      picture.choices ?? "",
      element("div", { class: "stage" }, picture.stage),
      element(
        "div", { class: "dock" },
        this.sentence,
        element(
          "div", { class: "controls" },
          this.playButton,
          button("Back", "back", () => { this.pause(); this.move(-1); }),
          button("Step", "step", () => { this.pause(); this.move(1); }),
          this.range, this.counter, speed, more,
        ),
      ),
    );
    if (picture.after) root.append(picture.after);
    if (picture.line) {
      root.append(element("details", { class: "line" }, element("summary", {}, "The line of the trace behind this step"), this.code));
    }
    root.addEventListener("keydown", (event) => this.pressed(event));
    this.show(0);
  }

  /** Show a step, the nearest there is. */
  show(step) {
    const last = this.picture.count - 1;
    this.step = Math.max(0, Math.min(step, last));
    this.picture.draw(this.step);
    this.sentence.textContent = this.picture.say(this.step);
    if (this.picture.line) this.code.textContent = this.picture.line(this.step);
    this.range.max = last;
    this.range.value = this.step;
    this.range.setAttribute("aria-valuetext", `step ${this.step + 1} of ${last + 1}`);
    this.counter.textContent = `${this.step + 1} / ${last + 1}`;
    this.root.dataset.step = this.step;
    if (this.step === last) this.pause();
  }

  /** Show a later step, or an earlier one. */
  move(by) {
    this.show(this.step + by);
  }

  /** Play, or pause. */
  toggle() {
    if (this.timer === null) this.play();
    else this.pause();
  }

  /** Play from here; from the start if this is the end. A screen reader hears the last step only. */
  play() {
    if (this.step === this.picture.count - 1) this.show(0);
    this.timer = setInterval(() => this.move(1), this.pace);
    this.sentence.setAttribute("aria-live", "off");
    this.playButton.textContent = "Pause";
  }

  /** Stop playing, if it plays. */
  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.sentence.setAttribute("aria-live", "polite");
    this.playButton.textContent = "Play";
  }

  /** Go on at another pace, if it plays. */
  restart() {
    if (this.timer === null) return;
    this.pause();
    this.play();
  }

  /** Act on keys, but for those that a control of the player takes itself. */
  pressed(event) {
    const control = event.target.tagName;
    if (event.altKey || event.ctrlKey || event.metaKey || control === "SELECT") return;
    const acts = {
      " ": () => this.toggle(),
      ArrowRight: () => { this.pause(); this.move(1); },
      ArrowLeft: () => { this.pause(); this.move(-1); },
      Home: () => { this.pause(); this.show(0); },
      End: () => { this.pause(); this.show(Infinity); },
    };
    const taken = control === "BUTTON" || control === "SUMMARY" ? [" "] : control === "INPUT" ? ["ArrowRight", "ArrowLeft", "Home", "End"] : [];
    if (!(event.key in acts) || taken.includes(event.key)) return;
    event.preventDefault();
    acts[event.key]();
  }
}

/** Return a row of buttons of which one is pressed; `choose(index)` is called when that changes. */
function choiceRow(label, names, choose) {
  const buttons = names.map((name, index) =>
    element("button", { type: "button", "aria-pressed": String(index === 0), onclick: () => {
      buttons.forEach((each, other) => each.setAttribute("aria-pressed", String(other === index)));
      choose(index);
    } }, name));
  return element("div", { class: "choices", role: "group", "aria-label": label }, buttons);
}

// 1. Without a cache, and with one.

const WORK = {
  computed: ["●", "computed"], reused: ["○", "reused"], vain: ["×", "computed again in vain"], none: ["", ""],
};

/** Return how a step deals with the K/V of each token: those it projects, and those it has. */
function stepCells(run, prompt, step, columns) {
  const seen = prompt + step;
  const from = seen - run.projections[step];
  return Array.from({ length: columns }, (_, token) => {
    if (token >= seen) return "none";
    if (token < from) return "reused";
    return step > 0 && token < seen - 1 ? "vain" : "computed";
  });
}

/** Return a table of tokens by steps, and the function that fills it up to a step. */
function workGrid(title, run, data) {
  const columns = data.prompt + data.output - 1;
  const cells = run.projections.map(() => Array.from({ length: columns }, () => element("td")));
  const rows = cells.map((row, step) => element("tr", {}, element("th", { scope: "row" }, step + 1), row));
  const table = element(
    "table", { class: "grid" },
    element("caption", { class: "hidden" }, `${title}: what each step does with the K/V of each token`),
    element(
      "thead", {},
      element("tr", {}, element("th", {}), element("th", { class: "group", colspan: data.prompt }, "prompt"), element("th", { class: "group", colspan: columns - data.prompt }, "written")),
      element("tr", {}, element("th", {}, "step"), Array.from({ length: columns }, (_, token) => element("th", { scope: "col" }, token + 1))),
    ),
    element("tbody", {}, rows),
  );
  const facts = factList(["K/V computed, in this step", "in all so far", "in vain so far", "FLOP so far"]);
  const counts = run.projections.map((_, step) => stepCells(run, data.prompt, step, columns));
  const draw = (now) => {
    cells.forEach((row, step) => row.forEach((cell, token) => {
      const kind = step <= now ? counts[step][token] : "none";
      const [mark, text] = WORK[kind];
      cell.className = `${kind === "vain" ? "vain hatched" : kind}${step === now && kind !== "none" ? " now" : ""}`;
      cell.replaceChildren(element("span", { "aria-hidden": "true" }, mark), element("span", { class: "hidden" }, text));
      cell.title = text && `token ${token + 1} in step ${step + 1}: ${text}`;
    }));
    const sum = (numbers) => numbers.slice(0, now + 1).reduce((total, number) => total + number, 0);
    const vain = sum(counts.map((row) => row.filter((kind) => kind === "vain").length));
    facts.set("K/V computed, in this step", format.counted(run.projections[now], "token"));
    facts.set("in all so far", format.counted(sum(run.projections), "token"));
    facts.set("in vain so far", format.counted(vain, "token"));
    facts.set("FLOP so far", `${format.number(sum(run.flop) / 1e6)} million`);
  };
  return { block: element("div", {}, element("h3", {}, title), table, facts.list), draw, sum: (now) => run.projections.slice(0, now + 1).reduce((a, b) => a + b, 0) };
}

/** Part 1: what each step computes, reuses, and computes in vain. */
function cachingPicture(data) {
  const [none, , paged] = data.caches;
  const naive = workGrid("Without a cache", none, data);
  const cached = workGrid("With a cache", paged, data);
  const say = (step) => {
    const tokens = data.prompt + step;
    if (step === 0) {
      return `Step 1 is the prefill: both compute the K/V of the ${data.prompt} tokens of the prompt, and write token ${tokens + 1}. So far there is no difference.`;
    }
    const times = format.number(Number((naive.sum(step) / cached.sum(step)).toPrecision(2)));
    const end = step === data.output - 1
      ? ` That is the end: ${naive.sum(step)} against ${cached.sum(step)} in all, ${times} times as much, and the texts are equal. The longer the text, the worse.`
      : "";
    return `Step ${step + 1} writes token ${tokens + 1}. Without a cache it computes K/V of all ${tokens} tokens, ${tokens - 1} of them in vain. With a cache it computes that of token ${tokens} alone, and reads the other ${tokens - 1}.${end}`;
  };
  return {
    stage: [
      element("div", { class: "two" }, naive.block, cached.block),
      legend([[sign("computed", "●"), "computed"], [sign("reused", "○"), "reused from the cache"], [sign("vain hatched", "×"), "computed again in vain"]]),
    ],
    count: data.output,
    draw: (step) => { naive.draw(step); cached.draw(step); },
    say,
  };
}

// 3. Sharing.

/** Part 3: the pool and the block tables, a line of the trace a step. */
function sharingPicture(data) {
  const pool = element("ul", { class: "blocks", "aria-label": "Blocks of the pool" });
  const tables = element("ul", { class: "tables" });
  const summary = element("p", { class: "soft" });
  const light = (block, on) => {
    for (const each of [...pool.children, ...tables.querySelectorAll(".entry")]) {
      if (each.dataset.block === String(block)) each.classList.toggle("lit", on);
    }
  };
  const lit = (block) => ({ "data-block": block, onmouseenter: () => light(block, true), onmouseleave: () => light(block, false) });
  const card = ({ kind, by, words }, block, fresh) => {
    const state = by.length > 1 ? `shared by ${by.length}` : kind === "cached" && by.length ? "has a key" : kind;
    const slots = Array.from({ length: data.block_size }, (_, place) => element("li", {}, words[place] ?? (kind === "free" ? "" : "·")));
    return element(
      "li", { class: `block ${kind}${fresh ? " fresh" : ""}`, ...lit(block) },
      element("header", {}, element("span", { class: "soft" }, block), by.map(badge)),
      element("ol", { class: "slots" }, slots),
      element("div", { class: "state" }, state),
    );
  };
  const row = ({ name, tokens, blocks }, holders) => element(
    "li", {}, badge(name), element("span", { class: "soft" }, format.counted(tokens, "token")),
    blocks.map((block) => element("span", { class: `entry${holders[block] > 1 ? " shared" : ""}`, style: hue(name), title: `block ${block}`, ...lit(block) }, block)),
  );
  const frames = data.frames;
  return {
    stage: element(
      "div", { class: "stage sharing" },
      element("div", { class: "pool" }, element("h3", {}, `The pool: ${data.blocks} blocks of ${data.block_size} tokens`), pool),
      element("div", {}, element("h3", {}, "Block tables"), tables, summary),
    ),
    count: frames.length,
    draw(step) {
      const frame = frames[step];
      const holders = frame.pool.map(({ by }) => by.length);
      pool.replaceChildren(...frame.pool.map((each, block) => card(each, block, frame.fresh.includes(block))));
      tables.replaceChildren(...frame.tables.map((each) => row(each, holders)));
      if (!frame.tables.length) tables.replaceChildren(element("li", { class: "soft" }, "No request is running."));
      const used = frame.pool.filter(({ kind }) => kind !== "free").length;
      const entries = frame.tables.reduce((sum, { blocks }) => sum + blocks.length, 0);
      summary.textContent = `The tables have ${format.counted(entries, "entry").replace("entrys", "entries")}; ${format.counted(used, "block")} of the pool ${used === 1 ? "is" : "are"} in use.`;
    },
    say: (step) => frames[step].say,
    line: (step) => frames[step].line,
  };
}

// 4. Eviction.

/** Part 4: the same requests under two policies, a request a step. */
function evictionPicture(data) {
  let chosen = data.cases[0];
  const about = element("p", { style: "margin: 0" });
  const rounds = element("table", { class: "rounds" });
  const sides = element("div", { class: "two" });
  const size = data.prompt_blocks;
  const summary = (run, step) => run.frames.slice(0, step + 1).reduce((sum, { hit }) => sum + size - hit, 0);

  const roundTable = (step) => {
    const head = element("tr", {}, element("th", { scope: "row" }, "asks"), chosen.requests.map((name, turn) =>
      element("th", { scope: "col", class: turn === step ? "now" : "" }, badge(name))));
    const row = (run) => element("tr", {}, element("th", { scope: "row" }, run.policy.toUpperCase()), run.frames.map(({ hit }, turn) => {
      const made = size - hit;
      const kind = made === 0 ? "reused" : hit === 0 ? "computed" : "slot";
      const text = `${hit} of ${hit + made} blocks hit, ${made} computed`;
      return turn > step
        ? element("td", {})
        : element("td", { class: `${kind}${turn === step ? " now" : ""}`, title: text }, element("span", { "aria-hidden": "true" }, `${hit}/${hit + made}`), element("span", { class: "hidden" }, text));
    }));
    rounds.replaceChildren(element("caption", { class: "hidden" }, "Blocks that hit, by request and policy"), element("thead", {}, head), element("tbody", {}, chosen.runs.map(row)));
  };

  const side = (run, step) => {
    const frame = run.frames[step];
    const name = chosen.requests[step];
    const before = step ? run.frames[step - 1].pool : [];
    const cells = frame.pool.map((label, block) => {
      if (label === null) return element("li", { class: "cached-block empty" }, "–", element("small", {}, "free"));
      const own = label[0] === name;
      const made = own && before[block] !== label;
      return element("li", { class: `cached-block${made ? " made" : ""}`, style: hue(label[0]) }, label, element("small", {}, made ? "new" : own ? "hit" : ""));
    });
    const out = Object.values(Object.groupBy(frame.evicted, ({ block }) => block[0])).map((group) => {
      const [{ block, missed }] = group;
      const blocks = `${listed(group.map((each) => each.block))} ${group.length > 1 ? "leave" : "leaves"} for ${name}: `;
      return element("li", {}, badge(block[0]), ` ${blocks}`, missed ? element("b", {}, `computed again for request ${missed}`) : "not needed again");
    });
    const full = summary(run, step);
    return element(
      "div", {},
      element("h3", {}, `${run.policy.toUpperCase()}: ${full} blocks computed so far`),
      element("ul", { class: "blocks small", "aria-label": `Pool under ${run.policy}` }, cells),
      element("ul", { class: "victims" }, out.length ? out : element("li", { class: "soft" }, "Nobody has to leave.")),
    );
  };

  const picture = {
    stage: element("div", { class: "stage" }, about, rounds, sides, legend([[sign("reused", "3"), "all blocks hit"], [sign("slot", "1"), "some"], [sign("computed", "0"), "none: all are computed"]])),
    get count() { return chosen.requests.length; },
    draw(step) {
      about.textContent = chosen.about;
      roundTable(step);
      sides.replaceChildren(...chosen.runs.map((run) => side(run, step)));
    },
    say(step) {
      const name = chosen.requests[step];
      const told = chosen.runs.map((run) => {
        const { hit, evicted } = run.frames[step];
        const made = size - hit;
        const what = made === 0 ? `all ${size} blocks hit` : hit === 0 ? `nothing hits, so ${size} blocks are computed` : `${hit} of ${size} blocks hit, ${made} are computed`;
        const who = evicted.length ? `, and ${listed(evicted.map(({ block }) => block))} must leave` : "";
        return `${run.policy.toUpperCase()}: ${what}${who}.`;
      });
      const last = step === chosen.requests.length - 1;
      const end = last ? ` In the end LRU has computed ${summary(chosen.runs[0], step)} blocks and LFU ${summary(chosen.runs[1], step)}. No policy is best for all; that is why one measures.` : "";
      return `Request ${step + 1} asks for ${name}. ${told.join(" ")}${end}`;
    },
  };
  picture.choices = choiceRow("Sequence of requests", data.cases.map(({ name }) => name), (index) => {
    chosen = data.cases[index];
    picture.player.pause();
    picture.player.show(0);
  });
  return picture;
}

// 5. Forgetting.

/** Part 5: what is kept and where attention goes, a step of the model a step. */
function windowPicture(data) {
  let chosen = data.variants[0];
  const blocks = element("ul", { class: "blocks", "aria-label": "Blocks of the text" });
  const facts = factList(["tokens so far", "blocks kept", "attention on what is kept", "answer so far"]);
  const answers = element("table");
  const gone = (frame, place) => frame.gone.some(([first, end]) => place >= first && place < end);
  const lost = (variant, step) => {
    const frame = variant.frames[step];
    return variant.attention[frame.computed - 1].reduce((sum, share, token) => sum + (gone(frame, Math.floor(token / data.block_size)) ? share : 0), 0);
  };
  const text = () => [...data.words, ...chosen.answer];
  const written = (frame) => Math.max(0, frame.computed - data.words.length + 1);
  const draw = (step) => {
    const frame = chosen.frames[step];
    const words = text();
    const shares = chosen.attention[frame.computed - 1];
    const all = Math.ceil((data.words.length + data.output - 1) / data.block_size);
    blocks.replaceChildren(...Array.from({ length: all }, (_, place) => {
      const begun = place * data.block_size < frame.computed;
      const dropped = gone(frame, place);
      const slots = Array.from({ length: data.block_size }, (_unused, offset) => {
        const token = place * data.block_size + offset;
        if (token >= frame.computed) return element("li", {}, " ");
        const share = shares[token];
        const colour = dropped ? "grey" : "blue";
        const style = share > 0.005 ? `background: linear-gradient(90deg, color-mix(in srgb, var(--${colour}) 38%, transparent) ${100 * share}%, transparent 0)` : null;
        return element("li", { style, class: token >= frame.computed - frame.new ? "now" : "" }, words[token], share > 0.005 ? element("span", { class: "share" }, `${Math.round(100 * share)}%`) : null);
      });
      const kind = !begun ? "free" : dropped ? "gone hatched" : "cached";
      const sink = chosen.retention?.includes("sinks") && place === 0;
      const state = !begun ? "to come" : dropped ? "forgotten" : sink ? "sink: stays" : "kept";
      return element("li", { class: `block ${kind}` }, element("ol", { class: "slots" }, slots), element("div", { class: "state" }, state));
    }));
    const kept = frame.table.length;
    facts.set("tokens so far", frame.computed);
    facts.set("blocks kept", `${kept} of ${Math.ceil(frame.computed / data.block_size)}`);
    facts.set("attention on what is kept", format.share(1 - lost(chosen, step)));
    facts.set("answer so far", chosen.answer.slice(0, written(frame)).join(" ") || "none yet");
  };
  const compare = () => {
    const asked = data.variants[0].frames.findIndex((frame) => frame.computed === data.words.length);
    answers.replaceChildren(
      element("caption", {}, "In comparison, when the code is asked for"),
      element("thead", {}, element("tr", {}, ["retention", "the model answers", "blocks kept", "attention kept"].map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, data.variants.map((variant) => element("tr", {}, element("th", { scope: "row" }, variant.name), element("td", {}, variant.answer.join(" ")), element("td", { class: "number" }, variant.frames[asked].table.length), element("td", { class: "number" }, format.share(1 - lost(variant, asked)))))),
    );
  };
  compare();
  const picture = {
    stage: element(
      "div", { class: "stage story" }, blocks, facts.list,
      legend([[sign("reused", ""), "kept"], [sign("slot hatched", ""), "forgotten, struck out"], [sign("computed", ""), "bar and %: attention of the newest token"]]),
    ),
    after: element("div", { class: "scroll" }, answers),
    get count() { return chosen.frames.length; },
    draw,
    say(step) {
      const frame = chosen.frames[step];
      const before = step ? chosen.frames[step - 1] : { gone: [] };
      const newly = Array.from({ length: Math.ceil(frame.computed / data.block_size) }, (_, place) => place).filter((place) => gone(frame, place) && !gone(before, place));
      const words = text();
      const count = written(frame);
      const start = count === 0
        ? `The model reads ${frame.new} more words.`
        : count === 1 ? `The story has ended with “${data.words.slice(-3).join(" ")}”, and the model answers “${chosen.answer[0]}”.` : `It goes on with “${chosen.answer[count - 1]}”.`;
      const forgotten = newly.map((place) => `“${words.slice(place * data.block_size, (place + 1) * data.block_size).join(" ")}”`);
      const forgets = newly.length ? ` Outside the window now, and forgotten: ${listed(forgotten)}.` : "";
      const kept = (token) => !gone(frame, Math.floor(token / data.block_size));
      const wanted = chosen.attention[frame.computed - 1].flatMap((share, token) => (token > 0 && share > 0.1 ? [token] : []));
      const found = wanted.length === 0 ? "" : ` One head looks up what followed “${words[frame.computed - 1]}” before, ${listed(wanted.map((token) => `“${words[token]}”`))}`;
      const looks = found && (wanted.some(kept) ? `${found}.` : `${found}: but that is forgotten, so what it writes is a guess.`);
      const rests = count !== 1 ? "" : kept(0) ? " The other heads rest on the first token." : " The first token, on which the other heads rest, is forgotten. This small model gets along without it; trained models do not.";
      return `${start}${forgets}${count ? looks : ""}${rests}`;
    },
  };
  picture.choices = choiceRow("Retention policy", data.variants.map(({ name }) => name), (index) => {
    chosen = data.variants[index];
    picture.player.pause();
    picture.player.show(picture.player.step);
  });
  return picture;
}

// 6. One attention step.

/** Part 6: one head, a column of numbers a step. */
function attentionPicture(data) {
  const rounded = (number, digits) => {
    const text = Math.abs(number).toFixed(digits);
    return number < 0 && Number(text) !== 0 ? `−${text}` : text;
  };
  const short = (number) => rounded(number, 2);
  const exact = (number) => rounded(number, 3);
  const vector = (numbers) => element("span", { class: "vector" }, numbers.map((number) => {
    const strength = Math.min(60, Math.round(22 * Math.abs(number)));
    return element("span", { style: `background: color-mix(in srgb, var(--${number < 0 ? "orange" : "blue"}) ${strength}%, transparent)` }, short(number));
  }));
  const vectorText = (numbers) => `[${numbers.map(short).join(", ")}]`;
  const count = data.keys.length;
  const rows = Array.from({ length: count }, (_, token) => token);
  const root = Math.sqrt(data.width);
  const words = [...data.words, "(new)"];
  const why = element("p", { class: "why soft", "aria-live": "polite" });
  const weighted = rows.map((token) => data.values[token].map((number) => number * data.weights[token]));
  // Each column: its heading, the step from which it is shown, what it is made of, its cells, and how they come about.
  const columns = [
    { id: "key", head: "key k", from: 0, used: [0, 1], cell: (token) => vector(data.keys[token]) },
    { id: "dot", head: "q · k", from: 1, used: [1, 2], cell: (token) => exact(data.dots[token]),
      why: (token) => `q · k = ${data.query.map((number, place) => `${short(number)} × ${short(data.keys[token][place])}`).join(" + ")} = ${exact(data.dots[token])}` },
    { id: "score", head: `score: ÷ √${data.width}`, from: 2, used: [2, 3], cell: (token) => exact(data.scores[token]),
      why: (token) => `${exact(data.dots[token])} ÷ √${data.width} = ${exact(data.dots[token])} ÷ ${root} = ${exact(data.scores[token])}` },
    { id: "exponential", head: ["e", element("sup", {}, "score")], from: 3, used: [3, 4], cell: (token) => exact(data.exponentials[token]),
      why: (token) => `e raised to ${exact(data.scores[token])} = ${exact(data.exponentials[token])}` },
    { id: "weight", head: "weight", from: 4, used: [4, 5], cell: (token) => [exact(data.weights[token]), element("span", { class: "bar", "aria-hidden": "true" }, element("i", { style: `width: ${100 * data.weights[token]}%` }))],
      why: (token) => `${exact(data.exponentials[token])} ÷ ${exact(data.total)} = ${exact(data.weights[token])}: the share of “${words[token]}” in the answer` },
    { id: "value", head: "value v", from: 0, used: [0], cell: (token) => vector(data.values[token]) },
    { id: "weighted", head: "weight × v", from: 5, used: [5, 6], cell: (token) => vector(weighted[token]),
      why: (token) => `${exact(data.weights[token])} × ${vectorText(data.values[token])} = ${vectorText(weighted[token])}` },
  ];
  const explain = (text) => { why.textContent = text; };
  const cells = columns.map((column) => rows.map((token) => {
    const text = column.why?.(token);
    return element("td", text ? { "data-why": text, title: text, onmouseenter: () => explain(text), onfocus: () => explain(text) } : {}, column.cell(token));
  }));
  const heads = columns.map((column) => element("th", { scope: "col" }, column.head));
  const totals = columns.map(({ id }) => element("td", {}, id === "exponential" ? exact(data.total) : id === "weight" ? "1" : id === "weighted" ? vector(data.output) : ""));
  const table = element(
    "table", { class: "numbers" },
    element("caption", { class: "hidden" }, "One attention step: from keys and a query to weights, and from weights and values to the output"),
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "token"), heads)),
    element("tbody", {}, rows.map((token) => element("tr", {}, element("th", { scope: "row" }, sign(token === count - 1 ? "computed" : "reused", token === count - 1 ? "●" : "○"), ` ${words[token]}`), cells.map((column) => column[token])))),
    element("tfoot", {}, element("tr", {}, element("th", { scope: "row" }, "sum"), totals)),
  );
  const best = data.weights.indexOf(Math.max(...data.weights));
  const told = [
    `The newest token has just been computed. It brings a query, and a key and a value that join those of the ${count - 1} tokens before it. Those came from the cache: ${count - 1} of the ${count} rows were not computed in this step.`,
    "How well does each key fit the query? Multiply them number by number, and add up (the dot product). Large and positive: a good fit.",
    `Divide by the root of the width, √${data.width} = ${root}, so that wide heads do not get extreme scores.`,
    "Scores can be negative, shares cannot. So raise e to each of them: every number becomes positive, and better fits stand out.",
    `Divide by their sum, ${exact(data.total)}: now they are shares that add up to 1. This is the softmax. “${words[best]}” fits best and gets ${format.share(data.weights[best])}.`,
    "Weigh each value by its token's share.",
    `Add them up: that is the output of this head, ${vectorText(data.output)}, the same numbers that the model computed. The next token does it all again with another query, but with these same keys and values: that is why they are kept.`,
  ];
  return {
    stage: [
      legend([[sign("reused", "○"), "from the cache"], [sign("computed", "●"), "computed in this step"]]),
      element("div", { class: "query" }, element("b", {}, "query q of the newest token"), vector(data.query)),
      element("div", {}, element("div", { class: "scroll" }, table), why),
    ],
    count: told.length,
    draw(step) {
      columns.forEach(({ from, used, why: told_ }, column) => {
        const narrow = used.includes(step) ? "" : " wide-only";
        const later = from > step ? " later" : "";
        const current = from === step && step > 0;
        for (const cell of [heads[column], totals[column], ...cells[column]]) cell.className = `${current ? "current" : ""}${narrow}${later}`;
        if (told_) for (const cell of cells[column]) cell.tabIndex = current ? 0 : -1;
      });
      for (const cell of totals) cell.classList.toggle("later", step < (cell === totals.at(-1) ? 6 : 4));
      why.textContent = step === 0 || step === told.length - 1 ? "" : `For example, ${columns.find(({ from, why: has }) => from === step && has).why(best)}`;
    },
    say: (step) => told[step],
  };
}

const tour = await readJson("tour");
const sizes = new Sizes(tour.memory);
for (const [name, label, picture] of [
  ["caching", "Generation without and with a cache", cachingPicture(tour.caching)],
  ["memory", "Growth of the cache", growthPicture(tour.caching)],
  ["sharing", "Block tables", sharingPicture(tour.sharing)],
  ["eviction", "Eviction under two policies", evictionPicture(tour.eviction)],
  ["window", "Forgetting while running", windowPicture(tour.window)],
  ["attention", "One attention step", attentionPicture(tour.attention)],
]) {
  picture.player = new Player(document.getElementById(`player-${name}`), label, picture);
}
calculator(sizes, document.getElementById("calculator"));
document.getElementById("theme-place").append(theme.button());
growthChart(sizes, document.getElementById("growth-chart"), document.getElementById("growth-table"));
document.body.dataset.ready = "";
