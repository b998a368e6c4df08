"use strict";
// Draws the page of `megappo trajectories`. Every text of the run goes into text nodes and attributes by the DOM; no markup is parsed.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FIELDS = [
    ["logprob", "log-prob"],
    ["entropy", "entropy"],
    ["kl", "KL: log π − log π_ref"],
    ["teacher_kl", "log π − log teacher"],
    ["advantage", "advantage"],
    ["value", "value"],
    ["returns", "return"],
    ["value_error", "value − return"],
    ["reward", "reward"],
    ["log_ratio", "log trainer / sampler"],
  ].filter(([key]) => data.samples.some((s) => s.fields[key]));
  const ORDERS = [["step", "step"], ["score", "score"], ["length", "length"], ["repetition", "repetition"], ["kl", "KL"], ["entropy", "entropy"]];
  const STRONGEST = 0.72; // opacity: text keeps a contrast of 4.5 on it
  const state = { shown: [], picked: null, field: FIELDS.length ? FIELDS[0][0] : "", alone: false, cursor: -1 };

  // ------------------------------------------------------------------------------------------------------------ elements
  function make(tag, attributes, ...children) {
    return fill(document.createElement(tag), attributes, children);
  }
  function draw(tag, attributes, ...children) {
    return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  }
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child != null).map(whole));
    return element;
  }
  // Half of a surrogate pair, which a model's bytes may leave, shows as U+FFFD everywhere.
  function whole(child) {
    return typeof child === "string" && child.toWellFormed ? child.toWellFormed() : child;
  }
  function choice(label, options, onchange, id) {
    const select = make("select", { id, onchange: () => onchange(select.value) }, options.map(([value, text]) => make("option", { value }, text)));
    return make("label", {}, label, select);
  }
  // Up to five significant digits, as the file has them.
  const exact = (number) => (number == null ? "–" : String(number));
  const short = (number) => (number == null ? "–" : String(Number(number.toPrecision(3))));
  const percent = (share) => (share == null ? "–" : (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + " %");

  // -------------------------------------------------------------------------------------------------------------- colours
  const scales = new Map();
  function scaleOf(field, samples) {
    const sizes = samples.flatMap((s) => (s.fields[field] || []).filter((v) => v != null).map(Math.abs)).sort((a, b) => a - b);
    return sizes.length ? sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1 : 1;
  }
  // The 98th percentile of the absolute values: one outlier does not pale the others. Symmetric: 0 has no colour.
  function scale(field, sample) {
    if (state.alone) return scaleOf(field, [sample]);
    if (!scales.has(field)) scales.set(field, scaleOf(field, data.samples));
    return scales.get(field);
  }
  function colour(value, limit) {
    const strength = STRONGEST * Math.min(1, Math.abs(value) / limit);
    return `rgba(var(--${value < 0 ? "low" : "high"}), ${strength.toFixed(3)})`;
  }
  function legend(sample) {
    const field = state.field, limit = scale(field, sample);
    const values = data.samples.flatMap((s) => s.fields[field] || []);
    const [least, most] = [values.some((v) => v < 0) ? -1 : 0, values.some((v) => v > 0) ? 1 : 0];
    const bar = make("span", { class: "bar" });
    for (let part = least; part <= most + 1e-9; part += 0.125) {
      const swatch = make("span", { title: short(part * limit) });
      swatch.style.backgroundColor = colour(part, 1);
      bar.append(swatch);
    }
    return make("span", { class: "legend", id: "legend" }, make("span", {}, least ? "≤ " + short(-limit) : "0"), bar, make("span", {}, most ? "≥ " + short(limit) : "0"));
  }

  // --------------------------------------------------------------------------------------------------------------- tokens
  function tokenText(text) {
    if (text === "") return [make("i", {}, "·")]; // part of a character that a later token completes
    const parts = text.split("\n");
    return parts.flatMap((part, i) => (i ? [make("i", {}, "↵"), "\n", part] : [part])).filter((part) => part !== "");
  }
  function tokenSpan(sample, place, inPrompt) {
    const ids = inPrompt ? sample.prompt_tokens : sample.tokens, texts = inPrompt ? sample.prompt_texts : sample.texts;
    const given = !inPrompt && !sample.mask[place];
    const kind = ["t", inPrompt && "prompt", given && "given", sample.special.includes(ids[place]) && "special"].filter(Boolean).join(" ");
    return make("span", { class: kind, "data-token": inPrompt ? "p" + place : place }, tokenText(texts[place]));
  }
  // All tokens of an image are one picture.
  function spansOf(sample, inPrompt) {
    const ids = inPrompt ? sample.prompt_tokens : sample.tokens;
    return Array.from(ids).flatMap((id, place) => {
      const picture = sample.images[id];
      if (!picture) return [tokenSpan(sample, place, inPrompt)];
      if (ids[place - 1] === id) return [];
      let end = place;
      while (ids[end] === id) end += 1;
      return [make("img", { class: "t prompt", "data-token": (inPrompt ? "p" : "") + place, src: picture, alt: `image of ${end - place} tokens` })];
    });
  }
  function paint() {
    const sample = data.samples[state.picked], numbers = sample.fields[state.field] || [], limit = scale(state.field, sample);
    for (const span of document.querySelectorAll("#tokens .t:not(.prompt)")) {
      const value = numbers[span.dataset.token];
      span.style.backgroundColor = value == null ? "" : colour(value, limit);
    }
    document.getElementById("legend").replaceWith(legend(sample));
  }
  const tip = make("div", { id: "tip", role: "tooltip", hidden: true });
  function explain(span) {
    const sample = data.samples[state.picked], key = span.dataset.token, inPrompt = key.startsWith("p");
    const place = Number(inPrompt ? key.slice(1) : key), ids = inPrompt ? sample.prompt_tokens : sample.tokens;
    const texts = inPrompt ? sample.prompt_texts : sample.texts;
    const row = (name, value, now) => make("tr", { class: now ? "now" : null }, make("th", {}, name), make("td", {}, value));
    const token = span.alt || JSON.stringify(texts[place]);
    const rows = [row("token", `${token}  (${ids[place]})`), row("place", `${place + 1} of ${ids.length}${inPrompt ? ", prompt" : ""}`)];
    if (!inPrompt && !sample.mask[place]) rows.push(row("given", "not sampled by the policy"));
    else if (!inPrompt) for (const [field, name] of FIELDS) if (sample.fields[field]) rows.push(row(name, exact(sample.fields[field][place]), field === state.field));
    tip.replaceChildren(make("table", {}, make("tbody", {}, rows)));
    tip.hidden = false;
    const box = span.getBoundingClientRect(), own = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(box.left, window.innerWidth - own.width - 8)) + "px";
    tip.style.top = (box.bottom + own.height + 8 > window.innerHeight ? Math.max(8, box.top - own.height - 6) : box.bottom + 6) + "px";
  }
  function moveCursor(to) {
    const spans = [...document.querySelectorAll("#tokens .t:not(.prompt)")];
    if (!spans.length) return;
    state.cursor = Math.max(0, Math.min(spans.length - 1, to));
    for (const span of spans) span.classList.toggle("cursor", Number(span.dataset.token) === state.cursor);
    spans[state.cursor].scrollIntoView({ block: "nearest" });
    explain(spans[state.cursor]);
  }
  function leaveTokens() {
    tip.hidden = true;
    for (const span of document.querySelectorAll("#tokens .cursor")) span.classList.remove("cursor");
  }

  // --------------------------------------------------------------------------------------------------------------- sample
  function fact(name, value) {
    return make("div", {}, make("dt", {}, name), make("dd", {}, value));
  }
  function show() {
    const panel = document.getElementById("sample");
    leaveTokens();
    state.cursor = -1;
    if (state.picked == null) {
      panel.replaceChildren(make("p", {}, "No sample matches."));
      return;
    }
    const s = data.samples[state.picked];
    const facts = [fact("score", exact(s.score)), ...Object.entries(s.parts).map(([name, value]) => fact(name, exact(value)))];
    if (s.recipe) facts.push(fact("recipe", s.recipe));
    facts.push(fact("answer", s.answer), fact("tokens", s.length), fact("end", s.finish === "length" ? "cut by the length limit" : s.finish));
    facts.push(fact("repetition", percent(s.repetition)));
    facts.push(fact("KL", exact(s.kl)), fact("entropy", exact(s.entropy)), fact("weights", "of step " + s.version));
    if (s.worst.length) facts.push(fact("listed for", s.worst.join(", ")));
    const alone = make("input", { type: "checkbox", id: "alone", onchange: () => { state.alone = alone.checked; paint(); } });
    alone.checked = state.alone;
    const field = choice("colour", FIELDS, (value) => { state.field = value; paint(); }, "field");
    field.querySelector("select").value = state.field;
    const tokens = make("div", {
      id: "tokens", tabindex: 0, role: "group", "aria-label": "tokens; left and right arrows go from one to the next",
      onmouseover: (event) => { const span = event.target.closest(".t"); if (span) explain(span); },
      onmouseleave: leaveTokens, onblur: leaveTokens, onkeydown: tokenKeys,
    });
    tokens.append(...spansOf(s, true), ...spansOf(s, false));
    if (s.finish === "length") tokens.append(make("span", { class: "end" }, " … cut"));
    panel.replaceChildren(
      make("h2", {}, `step ${s.step}, sample ${s.sample}: ${s.id}`),
      make("dl", {}, facts),
      make("div", { class: "field" }, field, make("label", {}, alone, "scale of this sample"), make("span", { id: "legend" })),
      tokens,
      make("p", { class: "keys" }, "j, k: next, previous sample · [, ]: colour · Tab to the tokens, then ← → for the numbers of each"),
    );
    paint();
    for (const dot of document.querySelectorAll(".dot.here")) dot.classList.toggle("picked", Number(dot.dataset.sample) === state.picked);
  }
  function tokenKeys(event) {
    const moves = { ArrowRight: state.cursor + 1, ArrowLeft: state.cursor - 1, Home: 0, End: Infinity };
    if (event.key in moves) {
      event.preventDefault();
      moveCursor(moves[event.key]);
    } else if (event.key === "Escape") leaveTokens();
  }

  // ----------------------------------------------------------------------------------------------------------------- list
  const filter = { step: "", finish: "", words: "", order: "step", down: false };
  function matches(s) {
    const words = filter.words.toLowerCase();
    return (filter.step === "" || String(s.step) === filter.step) && (filter.finish === "" || s.finish === filter.finish)
      && (words === "" || [s.id, s.prompt, s.response, s.worst.join(" ")].some((text) => text.toLowerCase().includes(words)));
  }
  const line = (text) => text.slice(0, 160).replace(/\s+/g, " ").trim();
  function refresh() {
    const value = (i) => data.samples[i][filter.order];
    state.shown = data.samples.map((_, i) => i).filter((i) => matches(data.samples[i]));
    // Without a number at the end, in both directions.
    state.shown.sort((a, b) => (value(a) == null) - (value(b) == null) || (filter.down ? value(b) - value(a) : value(a) - value(b)) || a - b);
    document.getElementById("samples").replaceChildren(...state.shown.map((i) => {
      const s = data.samples[i];
      return make("li", { role: "option", id: "s" + i, "data-sample": i, "aria-selected": "false", onclick: () => pick(i) },
        make("div", { class: "numbers" }, make("b", {}, "score " + short(s.score)), make("span", {}, "step " + s.step), make("span", {}, s.length + " tokens" + (s.finish === "length" ? ", cut" : "")),
          s.repetition ? make("span", {}, "rep " + percent(s.repetition)) : null),
        make("div", { class: "asked" }, line(s.prompt)), make("div", { class: "text" }, line(s.response) || "(empty)"));
    }));
    document.getElementById("count").textContent = `${state.shown.length} of ${data.samples.length} samples`;
    pick(state.shown.includes(state.picked) ? state.picked : state.shown.length ? state.shown[0] : null);
  }
  function pick(index) {
    state.picked = index;
    const list = document.getElementById("samples");
    for (const item of list.children) item.setAttribute("aria-selected", String(Number(item.dataset.sample) === index));
    const item = index == null ? null : document.getElementById("s" + index);
    if (item) {
      list.setAttribute("aria-activedescendant", item.id);
      // Not scrollIntoView, which would scroll the page too.
      if (item.offsetTop - list.offsetTop < list.scrollTop) list.scrollTop = item.offsetTop - list.offsetTop;
      const below = item.offsetTop - list.offsetTop + item.offsetHeight - list.clientHeight;
      if (below > list.scrollTop) list.scrollTop = below;
    }
    show();
  }
  function step(by) {
    const at = state.shown.indexOf(state.picked) + by;
    if (state.shown.length) pick(state.shown[Math.max(0, Math.min(state.shown.length - 1, at))]);
  }
  function listKeys(event) {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      event.preventDefault();
      step(moves[event.key]);
    }
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    if (event.key === "j") step(1);
    if (event.key === "k") step(-1);
    if ((event.key === "[" || event.key === "]") && state.picked != null && FIELDS.length) {
      const at = FIELDS.findIndex(([key]) => key === state.field) + (event.key === "]" ? 1 : FIELDS.length - 1);
      state.field = FIELDS[at % FIELDS.length][0];
      document.getElementById("field").value = state.field;
      paint();
    }
  });

  // --------------------------------------------------------------------------------------------------------------- charts
  const W = 400, H = 220, LEFT = 56, RIGHT = 14, TOP = 30, BOTTOM = 36;
  function ticks(low, high) {
    if (!(high > low)) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
    const size = power * [1, 2, 2.5, 5, 10].find((factor) => power * factor >= rough * 0.999);
    const marks = [];
    for (let i = Math.floor(low / size + 1e-9); i <= Math.ceil(high / size - 1e-9); i += 1) marks.push(Number((i * size).toPrecision(12)));
    return marks;
  }
  // series: [{name, kind: "a" | "b", points: [[x, y]], dots: [element attributes]}]; names: of the x values 0, 1, 2 ...
  function chart(title, series, xName, names) {
    const points = series.flatMap((one) => one.points).filter(([, y]) => y != null);
    if (!points.length) return null;
    const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
    const least = (values) => values.reduce((a, b) => Math.min(a, b)), most = (values) => values.reduce((a, b) => Math.max(a, b));
    const yTicks = ticks(least(ys), most(ys)), xTicks = names ? names.map((_, i) => i) : ticks(least(xs), most(xs));
    const [xLow, xHigh] = names ? [-0.5, names.length - 0.5] : [xTicks[0], xTicks[xTicks.length - 1]];
    const x = (value) => LEFT + ((value - xLow) / (xHigh - xLow)) * (W - LEFT - RIGHT);
    const y = (value) => H - BOTTOM - ((value - yTicks[0]) / (yTicks[yTicks.length - 1] - yTicks[0])) * (H - TOP - BOTTOM);
    const svg = draw("svg", { class: "chart", width: W, height: H, viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title }, draw("text", { class: "title", x: 10, y: 18 }, title));
    for (const mark of yTicks) svg.append(draw("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: y(mark), y2: y(mark) }), draw("text", { x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, String(mark)));
    xTicks.forEach((mark) => svg.append(draw("text", { x: x(mark), y: H - BOTTOM + 15, "text-anchor": "middle" }, names ? names[mark] : String(mark))));
    svg.append(draw("text", { x: (LEFT + W - RIGHT) / 2, y: H - 6, "text-anchor": "middle" }, xName));
    series.forEach((one, i) => {
      const known = one.points.map(([a, b], place) => [a, b, place]).filter(([, b]) => b != null);
      if (!one.dots) svg.append(draw("polyline", { class: one.kind, points: known.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
      for (const [a, b, place] of known) svg.append(draw("circle", { cx: x(a).toFixed(1), cy: y(b).toFixed(1), r: one.dots ? 3.5 : 2.5, class: one.kind, ...(one.dots ? one.dots[place] : {}) }));
      if (!one.name) return;
      const name = draw("text", { x: W - RIGHT, y: 18 + 12 * i, "text-anchor": "end" }, one.name);
      name.prepend(draw("tspan", { class: one.kind, stroke: "none" }, one.dots ? (one.kind === "b" ? "○ " : "● ") : one.kind === "b" ? "╌ " : "— "));
      svg.append(name);
    });
    return svg;
  }
  function charts() {
    const dots = (cut) => data.dots.filter((dot) => dot[2] === cut);
    const scatter = [["a", "ended", false], ["b", "cut", true]].map(([kind, name, cut]) => ({
      kind, name, points: dots(cut).map(([length, score]) => [length, score]),
      dots: dots(cut).map((dot) => (dot[3] == null ? { class: `dot ${kind}` } : { class: `dot here ${kind}`, "data-sample": dot[3], onclick: () => reveal(dot[3]) })),
    })).filter((one) => one.points.length);
    const names = data.positions.map((one) => (data.byToken ? one.position : one.position.split("-")[0]));
    const line = (key, name, kind) => ({ kind, name, points: data.positions.map((one, i) => [i, one[key]]) });
    const where = data.byToken ? "token of the response" : "part of the response, from %";
    return [
      chart("score against length", scatter, "tokens of the response"),
      chart("entropy by position, nats", [line("entropy", "", "a")], where, names),
      chart("KL by position, nats per token", [line("kl", "", "a")], where, names),
      chart("value and return by position", [line("value", "value", "a"), line("returns", "return", "b")], where, names),
    ].filter(Boolean);
  }
  function reveal(index) {
    if (!state.shown.includes(index)) {
      Object.assign(filter, { step: "", finish: "", words: "" });
      for (const id of ["byStep", "byEnd", "words"]) document.getElementById(id).value = "";
      refresh();
    }
    pick(index);
  }

  // ----------------------------------------------------------------------------------------------------------------- page
  const steps = [...new Set(data.samples.map((s) => String(s.step)))];
  const words = make("input", { type: "search", id: "words", placeholder: "search prompts and responses", "aria-label": "search", oninput: () => { filter.words = words.value; refresh(); } });
  const direction = make("button", { id: "direction", type: "button", "aria-label": "direction of the order", onclick: () => { filter.down = !filter.down; direction.textContent = filter.down ? "↓ falling" : "↑ rising"; refresh(); } }, "↑ rising");
  document.body.append(
    make("header", {}, make("h1", {}, data.run + ": trajectories"), make("p", {}, `${data.samples.length} of ${data.total} samples, ${steps.length === 1 ? "step " + steps[0] : steps.length + " steps"}`), data.notes.map((note) => make("p", {}, "Note: " + note))),
    make("main", {},
      make("details", { open: window.innerWidth > 760 }, make("summary", {}, "overview of all samples"), make("div", { class: "charts" }, charts())),
      make("div", { class: "columns" },
        make("section", { class: "list", "aria-label": "samples" },
          make("div", { class: "controls" },
            words,
            choice("step", [["", "all"], ...steps.map((one) => [one, one])], (value) => { filter.step = value; refresh(); }, "byStep"),
            choice("end", [["", "all"], ["stop", "stop"], ["length", "cut"]], (value) => { filter.finish = value; refresh(); }, "byEnd"),
            choice("by", ORDERS, (value) => { filter.order = value; refresh(); }, "order"),
            direction),
          make("div", { id: "count", role: "status" }),
          make("ul", { id: "samples", role: "listbox", tabindex: 0, "aria-label": "samples", onkeydown: listKeys })),
        make("section", { class: "sample", id: "sample", "aria-label": "sample" }))),
    tip,
  );
  // page.html#sample=3&field=kl opens there.
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (FIELDS.some(([key]) => key === wanted.get("field"))) state.field = wanted.get("field");
  if (/^\d+$/.test(wanted.get("sample") || "") && data.samples[wanted.get("sample")]) state.picked = Number(wanted.get("sample"));
  refresh();
})();
