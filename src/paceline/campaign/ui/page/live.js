"use strict";
// The live view of `paceline ui`: numbers arrive column by column once a second; canvases draw them. Names are text nodes.
addEventListener("DOMContentLoaded", () => {
  const root = document.getElementById("live"), $ = id => document.getElementById(id);
  const MISSING = "\u2013", STALE_S = 30, MOST_POINTS = 600;
  const UNITS = { utilisation: "%", memory: "GiB", power: "W", temperature: "\u00b0C", clock: "MHz", throttle: "", cpu: "%",
    host_memory: "GiB", received: "MB/s", sent: "MB/s" };
  const OF_HOSTS = new Set(["cpu", "host_memory", "received", "sent"]);
  const HEATED = new Set(["temperature", "throttle"]);
  let layout = { nodes: [], reasons: [], limits: {}, ranks: 1, per_node: 1 }, tick = null, steps = [], stepsOf = null, chosen = -1, logOf = null;
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const known = values => values.filter(value => value !== null);
  const short = value => value === null || value === undefined ? MISSING : Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name);

  // Colours of the theme as numbers, read again when it changes.
  let shades = null;
  function theme() {
    const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const read = name => {
      const span = make("span", { style: `color: var(${name})` });
      document.body.append(span);
      probe.fillStyle = getComputedStyle(span).color;
      span.remove();
      probe.fillRect(0, 0, 1, 1);
      return [...probe.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    };
    shades = Object.fromEntries(["ink", "quiet", "line", "paper", "wash", "s0", "s1", "bad"].map(name => [name, read(`--${name}`)]));
    const mix = (a, b, t) => `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t))})`;
    shades.cold = Array.from({ length: 65 }, (_, i) => mix(shades.wash, shades.s0, i / 64));
    shades.heat = Array.from({ length: 65 }, (_, i) => i < 36 ? mix(shades.s0, shades.wash, i / 36) : mix(shades.wash, shades.s1, (i - 36) / 28));
    shades.text = Object.fromEntries(["ink", "quiet", "line", "paper", "wash", "bad", "s0", "s1"].map(name => [name, `rgb(${shades[name]})`]));
  }

  // --- the map: a block per node, a square per GPU; of hosts one square per node ---

  const map = $("map"), pen = map.getContext("2d");
  let plan = { columns: 1, cell: 10, wide: 10, high: 10, gpus: 1, label: 0 };
  const offsets = () => { let n = 0; return layout.nodes.map(([, , gpus]) => { const at = n; n += gpus; return at; }); };
  let starts = [];

  function arrange() {
    const room = map.parentElement.clientWidth, count = Math.max(layout.nodes.length, 1);
    const gpus = Math.max(1, ...layout.nodes.map(node => node[2]));
    const label = count <= 64 ? 14 : 0, gap = count <= 64 ? 8 : 4;
    let cell = 28;
    // The largest squares with which all nodes fit a height that needs no scrolling.
    for (; cell > 4; cell--) {
      const columns = Math.max(1, Math.floor(room / (gpus * cell + gap)));
      if (Math.ceil(count / columns) * (cell + label + gap) <= 340) break;
    }
    const most = Math.max(1, Math.min(count, Math.floor((room + gap) / ((label ? Math.max(gpus * cell, 90) : gpus * cell) + gap))));
    const columns = Math.ceil(count / Math.ceil(count / most)); // rows of equal length: 16 nodes are 4 by 4, not 5, 5, 5 and 1
    cell = Math.max(4, Math.min(48, Math.floor(((room + gap) / columns - gap) / gpus)));
    const widest = label ? Math.max(gpus * cell, 90) : gpus * cell;
    plan = { columns, cell, gap, gpus, label, wide: widest + gap, high: cell + label + gap };
    const height = Math.ceil(count / columns) * plan.high, scale = devicePixelRatio || 1;
    map.width = Math.round(room * scale);
    map.height = Math.round(height * scale);
    map.style.height = `${height}px`;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    starts = offsets();
  }

  function range(gauge, values) {
    const limit = layout.limits[gauge], found = known(values);
    if (gauge === "utilisation" || gauge === "cpu") return [0, 100];
    if (gauge === "throttle") return [0, 1];
    if (gauge === "temperature") return [30, Math.max(90, ...found)];
    return [0, limit ?? found.reduce((a, b) => Math.max(a, b), 1)];
  }

  const shown = gauge => gauge === "throttle" ? tick.throttle.map(v => v === null ? null : v ? 1 : 0) : tick[gauge];

  function drawMap() {
    if (!tick?.run) return;
    const gauge = $("gauge").value, ofHosts = OF_HOSTS.has(gauge), values = shown(gauge), [low, high] = range(gauge, values);
    const ramp = HEATED.has(gauge) ? shades.heat : shades.cold, { columns, cell, wide, high: tall, label, gpus } = plan;
    pen.clearRect(0, 0, map.width, map.height);
    pen.font = "11px system-ui, sans-serif";
    layout.nodes.forEach(([name, , count], node) => {
      const x = (node % columns) * wide, y = Math.floor(node / columns) * tall;
      if (label) {
        pen.fillStyle = tick.age[node] > STALE_S ? shades.text.bad : shades.text.quiet;
        pen.fillText(name.length > 16 ? `${name.slice(0, 15)}\u2026` : name, x, y + 10);
      }
      const squares = ofHosts || !count ? 1 : count, size = ofHosts || !count ? gpus * cell : cell;
      for (let i = 0; i < squares; i++) {
        const value = ofHosts ? values[node] : count ? values[starts[node] + i] : null;
        const stale = tick.age[node] > STALE_S;
        pen.fillStyle = value === null || stale ? shades.text.line : ramp[Math.max(0, Math.min(64, Math.round((value - low) / (high - low) * 64)))];
        pen.fillRect(x + i * cell, y + label, size - 1, cell - 1);
        if (value === null || stale) { pen.strokeStyle = shades.text.quiet; pen.beginPath(); pen.moveTo(x + i * cell, y + label + cell - 1); pen.lineTo(x + i * cell + cell - 1, y + label); pen.stroke(); }
      }
      // Hot GPUs keep their mark whatever the map shows.
      for (let i = 0; i < count && !ofHosts; i++) if (tick.throttle[starts[node] + i] & layout.heat) {
        pen.strokeStyle = shades.text.s1; pen.lineWidth = 2; pen.strokeRect(x + i * cell + 1, y + label + 1, cell - 3, cell - 3); pen.lineWidth = 1;
      }
      if (node === chosen) { pen.strokeStyle = shades.text.ink; pen.lineWidth = 2; pen.strokeRect(x - 1, y + label - 1, (ofHosts ? gpus : Math.max(count, 1)) * cell + 1, cell + 1); pen.lineWidth = 1; }
    });
    const found = known(values).sort((a, b) => a - b), unit = UNITS[gauge];
    const say = found.length === 0 ? "not reported"
      : gauge === "throttle" ? `${found.filter(Boolean).length} of ${found.length} GPUs throttled`
      : `median ${short(found[found.length >> 1])} ${unit}, from ${short(found[0])} to ${short(found.at(-1))}`;
    const stale = tick.age.filter(age => age > STALE_S).length;
    $("summary").textContent = say + (stale ? `; ${stale} nodes silent for more than ${STALE_S} s` : "");
    $("low").textContent = gauge === "throttle" ? "no" : `${short(low)} ${unit}`;
    $("high").textContent = gauge === "throttle" ? "yes" : `${short(high)} ${unit}`;
    document.querySelector(".scale").classList.toggle("heat", HEATED.has(gauge));
    map.setAttribute("aria-label", `${layout.nodes.length} nodes, ${$("gauge").selectedOptions[0].text}: ${say}. Arrow keys choose a node.`);
  }

  const nodeAt = event => {
    const box = map.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / plan.wide), row = Math.floor((event.clientY - box.top) / plan.high);
    const node = row * plan.columns + column;
    return column < plan.columns && node < layout.nodes.length ? node : -1;
  };
  function choose(node) {
    chosen = node;
    drawMap();
    drawNode();
  }
  map.addEventListener("click", event => choose(nodeAt(event)));
  map.addEventListener("keydown", event => {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: plan.columns, ArrowUp: -plan.columns }[event.key];
    if (!move) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(layout.nodes.length - 1, chosen < 0 ? 0 : chosen + move)));
  });
  map.addEventListener("pointermove", event => { const node = nodeAt(event); map.title = node < 0 ? "" : layout.nodes[node][0]; });

  const reasons = bits => bits === null ? MISSING : layout.reasons.filter((_, i) => bits & (1 << i)).join(", ") || "none";
  function drawNode() {
    const panel = $("node");
    panel.hidden = chosen < 0 || chosen >= layout.nodes.length;
    if (panel.hidden || !tick?.run) return;
    const [host, rank, count] = layout.nodes[chosen], own = name => short(tick[name][chosen]);
    const ranks = layout.per_node > 1 ? `ranks ${rank} to ${rank + layout.per_node - 1}` : `rank ${rank}`;
    const facts = `${ranks}; CPU ${own("cpu")} %, memory ${own("host_memory")} GiB, network in ${own("received")} MB/s, out ${own("sent")} MB/s; ` +
      `last reading ${tick.age[chosen]} s ago`;
    const rows = Array.from({ length: count }, (_, i) => {
      const at = starts[chosen] + i;
      return make("tr", {}, make("td", { textContent: `GPU ${i}` }),
        ...["utilisation", "memory", "power", "temperature", "clock"].map(name => make("td", { className: "n", textContent: short(tick[name][at]) })),
        make("td", { textContent: reasons(tick.throttle[at]) }));
    });
    const heads = ["GPU", "busy, %", "memory, GiB", "power, W", "\u00b0C", "clock, MHz", "throttled by"];
    const button = make("button", { type: "button", textContent: `Log of rank ${rank}` });
    button.addEventListener("click", () => { const field = document.querySelector('.log [name="rank"]'); field.value = rank; field.dispatchEvent(new Event("change", { bubbles: true })); field.scrollIntoView({ block: "center" }); });
    panel.replaceChildren(make("h3", { textContent: host }), make("p", { className: "quiet", textContent: facts }),
      ...(count ? [make("div", { className: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((text, i) => make("th", { textContent: text, className: i && i < 6 ? "n" : "" })))), make("tbody", {}, ...rows)))] : []), button);
  }

  // --- lines and tiles ---

  function line(canvas, points) {
    const wide = canvas.clientWidth, tall = canvas.clientHeight, scale = devicePixelRatio || 1, ctx = canvas.getContext("2d");
    if (canvas.width !== Math.round(wide * scale)) { canvas.width = Math.round(wide * scale); canvas.height = Math.round(tall * scale); }
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, wide, tall);
    if (points.length < 2) {
      ctx.font = "13px system-ui, sans-serif"; ctx.fillStyle = shades.text.quiet; ctx.fillText("no steps yet", 2, 20);
      return;
    }
    const xs = points.map(p => p[0]), ys = points.map(p => p[1]).sort((a, b) => a - b);
    // A warm-up step may take a hundred times as long: the scale ends above the 98th percentile.
    const low = ys[0], most = canvas.id === "line-step" ? ys[Math.floor((ys.length - 1) * .98)] : ys.at(-1);
    const high = Math.max(most + .05 * Math.abs(most - low), low + 1e-9), left = 52, x0 = xs[0], x1 = xs.at(-1);
    const x = v => left + (v - x0) / (x1 - x0 || 1) * (wide - left - 4), y = v => 8 + (1 - (Math.min(v, high) - low) / (high - low)) * (tall - 30);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textAlign = "right";
    for (const v of [low, (low + high) / 2, high]) {
      ctx.strokeStyle = shades.text.line; ctx.beginPath(); ctx.moveTo(left, y(v)); ctx.lineTo(wide, y(v)); ctx.stroke();
      ctx.fillStyle = shades.text.quiet; ctx.fillText(short(v), left - 6, y(v) + 4);
    }
    ctx.fillText(`step ${x1}`, wide - 2, tall - 4);
    ctx.textAlign = "left";
    ctx.fillText(String(x0), left, tall - 4);
    ctx.strokeStyle = shades.text.s0; ctx.lineWidth = 1.6; ctx.lineJoin = "round"; ctx.beginPath();
    points.forEach(([a, b], i) => ctx[i ? "lineTo" : "moveTo"](x(a), y(b)));
    ctx.stroke();
    ctx.lineWidth = 1;
    canvas.setAttribute("aria-label", `${canvas.id === "line-loss" ? "Loss" : "Step time"}: ${short(points.at(-1)[1])} at step ${x1}`);
  }

  function tile(name, value, unit, interval, note, values = []) {
    const box = $(`tile-${name}`), [shownValue, small] = [box.querySelector(".value"), make("small", { textContent: unit })];
    shownValue.replaceChildren(`${value} `, small);
    box.querySelector(".interval").textContent = interval || "\u00a0";
    box.querySelector(".note").textContent = note;
    const found = values.slice(-60), low = Math.min(...found), high = Math.max(...found);
    box.querySelector("polyline").setAttribute("points", found.length < 2 ? "" :
      found.map((v, i) => `${(i * 120 / (found.length - 1)).toFixed(1)},${(3 + 22 * (1 - (v - low) / (high - low || 1))).toFixed(1)}`).join(" "));
  }

  function drawTiles() {
    const losses = steps.filter(s => s[2] !== null).map(s => s[2]), progress = tick.phase ?? "";
    tile("rate", tick.step_s ? short(1 / tick.step_s) : MISSING, "steps/s", tick.tokens_per_s ? `${short(tick.tokens_per_s)} tokens/s` : "", progress, steps.map(s => 1 / s[1]));
    tile("loss", tick.loss === null || tick.loss === undefined ? MISSING : tick.loss.toPrecision(4), "", losses.length > 1 ? `first shown ${losses[0].toPrecision(4)}` : "", "of rank 0", losses);
    tile("left", tick.left ? tick.left.replace(/^about |^time left | left$/g, "") : MISSING, "", `${tick.ended}${tick.planned === null ? "" : ` of ${tick.planned}`} runs ended${tick.spent}`, tick.trust ? tick.trust[1] : "");
    const power = known(tick.power ?? []), busy = known(tick.utilisation ?? []), hot = known(tick.temperature ?? []);
    const total = power.reduce((a, b) => a + b, 0);
    if (busy.length) tile("gpus", short(busy.reduce((a, b) => a + b, 0) / busy.length), "% busy", power.length ? `${short(total / 1000)} kW` : "", `${busy.length} GPUs on ${layout.nodes.length} node${layout.nodes.length === 1 ? "" : "s"}${hot.length ? `, up to ${Math.max(...hot)} \u00b0C` : ""}`);
    else { $("tile-gpus").querySelector(".name").textContent = "Hosts"; const cpu = known(tick.cpu ?? []); tile("gpus", cpu.length ? short(cpu.reduce((a, b) => a + b, 0) / cpu.length) : MISSING, "% CPU", tick.peak ? `peak ${tick.peak} GiB` : "", `${layout.nodes.length} node${layout.nodes.length === 1 ? "" : "s"}, no GPU`); }
  }

  function drawText() {
    $("now").textContent = tick.run ? tick.steps ? `${tick.title}: step ${Math.min(tick.step + 1, tick.steps).toLocaleString("en")} of ${tick.steps.toLocaleString("en")}` : `${tick.title}: ${tick.phase}` : tick.running ? (tick.waiting[0] ? `Waiting: ${tick.waiting[0]}` : "Between runs") : tick.state;
    const alerts = tick.run ? [...(tick.unseen ? [`${tick.unseen}.`] : []), ...(tick.straggler ? [`Straggler: ${tick.straggler}.`] : []), ...tick.suspects.map(text => `${text}.`)] : [];
    const list = $("alerts");
    if (list.dataset.shown !== alerts.join("\n")) { list.dataset.shown = alerts.join("\n"); list.replaceChildren(...alerts.map(textContent => make("li", { textContent }))); }
  }

  // --- what arrives ---

  const times = globalThis.livePaints = []; // milliseconds per update, for the benchmark
  function draw() {
    if (!tick) return;
    const began = performance.now();
    drawText();
    if (tick.run) { drawTiles(); drawMap(); drawNode(); line($("line-step"), steps.map(s => [s[0], s[1]])); line($("line-loss"), steps.filter(s => s[2] !== null).map(s => [s[0], s[2]])); }
    times.push(performance.now() - began);
    if (times.length > 1000) times.shift();
  }
  function follow() {
    if (!tick.run || logOf === tick.run) return;
    logOf = tick.run;
    const panel = document.querySelector(".log");
    panel.querySelector('[name="rank"]').max = layout.ranks - 1;
    panel.dispatchEvent(new CustomEvent("paceline-run", { detail: `${root.dataset.campaign}/run/${encodeURIComponent(tick.run)}/log/events` }));
  }

  theme();
  new MutationObserver(() => { theme(); draw(); }).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { theme(); draw(); });
  new ResizeObserver(() => { arrange(); draw(); }).observe(map.parentElement);
  $("gauge").addEventListener("change", drawMap);
  const source = new EventSource(root.dataset.events);
  const on = (name, take) => source.addEventListener(name, event => take(JSON.parse(event.data)));
  on("layout", value => {
    const first = !layout.nodes.length;
    layout = value;
    if (first && !value.nodes.some(node => node[2])) $("gauge").value = "cpu";
    if (chosen >= value.nodes.length) chosen = -1;
    arrange();
  });
  on("steps", value => {
    if (value.all || value.run !== stepsOf) steps = [];
    stepsOf = value.run;
    steps.push(...value.steps);
    if (steps.length > MOST_POINTS) steps = steps.slice(-MOST_POINTS);
  });
  on("runs", value => {
    const rows = value.map(([title, status, seconds, slug, error]) => make("tr", {},
      make("td", {}, make("a", { href: `${root.dataset.campaign}/run/${slug}`, textContent: title })),
      make("td", {}, make("span", { className: status === "ok" ? "good" : "bad", textContent: status }), make("small", { textContent: error })),
      make("td", { className: "n", textContent: seconds === null ? MISSING : `${short(seconds)} s` })));
    const table = make("table", {}, make("thead", {}, make("tr", {}, make("th", { textContent: "run" }), make("th", { textContent: "status" }), make("th", { textContent: "took", className: "n" }))), make("tbody", {}, ...rows));
    if (!rows.length) return;
    $("ended").replaceChildren(table);
    Paceline.dress(table);
    $("report").hidden = false;
    if (!layout.is_local) fetch(`${root.dataset.campaign}/headline`).then(answer => answer.ok ? answer.text() : "").then(text => { $("answer").textContent = text; }).catch(() => {});
  });
  on("tick", value => { tick = value; draw(); follow(); });
  source.onerror = () => { $("now").textContent = "The connection to `paceline ui` is lost; trying again."; };
});
