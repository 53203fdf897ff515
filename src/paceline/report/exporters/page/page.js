"use strict";
// Filters, sorting, hover, copies and downloads. Text from the report enters as text nodes only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  for (const p of data.charts.flatMap(chart => chart.points)) { // texts are written once and stand by their number
    for (const name of ["label", "group", "series"]) if (name in p) p[name] = data.words[p[name]];
    p.cells = p.cells.map(i => data.words[i]);
    if (p.detail) p.detail = p.detail.map(i => data.words[i]).join("\n");
  }
  const MOST_RUNS_TOLD = 4;
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  document.documentElement.classList.remove("no-js");

  // --- theme: the system's until the reader chooses ---

  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remembered = { // storage may be refused to a page that was opened from disk
    get: () => { try { return localStorage.getItem("paceline-theme"); } catch { return null; } },
    set: value => { try { localStorage.setItem("paceline-theme", value); } catch { /* it lasts as long as the page */ } },
  };
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; theme.title = `Switch to ${theme.textContent.toLowerCase()} colours`; };
  if (["light", "dark"].includes(remembered.get())) document.documentElement.dataset.theme = remembered.get();
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    remembered.set(document.documentElement.dataset.theme);
    nameTheme();
  });
  system.addEventListener("change", nameTheme);
  nameTheme();

  // --- filters: none chosen on an axis means all of it ---

  const chosen = data.axes.map(() => new Set());
  const isKept = cell => {
    const places = data.cells[cell];
    return !places || chosen.every((values, i) => !values.size || values.has(places[i]));
  };
  const anyKept = cells => !cells.length || cells.some(isKept);

  function filterBar() {
    const bar = document.getElementById("filters");
    if (!bar || !data.axes.length) return;
    data.axes.forEach((axis, i) => {
      const summary = make("summary"), panel = make("div"), box = make("details", { className: "filter" }, summary, panel);
      const say = () => {
        const words = axis.values.filter((_, k) => chosen[i].has(k));
        summary.textContent = `${axis.name}: ${words.length ? words.join(", ") : "all"}`;
        box.classList.toggle("active", words.length > 0);
      };
      axis.values.forEach((value, k) => {
        const tick = make("input", { type: "checkbox", name: axis.name, value });
        tick.addEventListener("change", () => { chosen[i][tick.checked ? "add" : "delete"](k); say(); apply(); });
        panel.append(make("label", {}, tick, value));
      });
      box.addEventListener("toggle", () => { if (box.open) $$(".filter[open]").forEach(o => { if (o !== box) o.open = false; }); });
      box.reset = () => { chosen[i].clear(); $$("input", box).forEach(t => { t.checked = false; }); say(); };
      say();
      bar.append(box);
    });
    const reset = make("button", { type: "button", id: "reset", hidden: true, textContent: "Reset" });
    reset.addEventListener("click", () => { $$(".filter", bar).forEach(box => box.reset()); apply(); });
    bar.append(reset, make("span", { id: "count", className: "quiet", ariaLive: "polite" }));
    bar.hidden = false;
    const close = () => $$(".filter[open]").forEach(box => { box.open = false; });
    document.addEventListener("click", event => { if (!event.target.closest(".filter")) close(); });
    document.addEventListener("keydown", event => { if (event.key === "Escape") { close(); tip.hidden = true; } });
  }

  function apply() {
    for (const element of $$("[data-cells]")) element.hidden = !anyKept(element.dataset.cells.split(" ").filter(Boolean));
    for (const block of $$(".block")) {
      const rows = $$("tbody > tr", block);
      block.hidden = rows.length > 0 && rows.every(row => row.hidden);
    }
    const cells = Object.keys(data.cells), kept = cells.filter(isKept).length;
    const reset = document.getElementById("reset"), active = chosen.some(values => values.size);
    if (reset) {
      reset.hidden = !active;
      document.getElementById("count").textContent = active ? `${kept} of ${cells.length} cells` : `${cells.length} cells`;
    }
    draw(figures);
  }

  // --- baseline: the row that all ratios refer to ---

  let baseline = null;
  function pick(cell) {
    baseline = cell === baseline ? null : cell;
    const name = baseline && data.names[baseline];
    for (const row of $$("#ranking tr[data-cells]")) {
      const own = row.dataset.cells, at = [...row.parentElement.parentElement.tHead.rows[0].cells].findIndex(h => h.dataset.versus != null);
      row.classList.toggle("baseline", own === baseline);
      row.querySelector(".pick")?.setAttribute("aria-pressed", own === baseline);
      if (at < 0) continue;
      const td = row.cells[at], head = row.parentElement.parentElement.tHead.rows[0].cells[at];
      td.first ??= [...td.childNodes];
      const ours = baseline && own !== baseline && (data.versus[own] ?? {})[baseline];
      const alike = baseline && [...row.parentElement.rows].some(r => r.dataset.cells === baseline);
      const shown = !alike ? td.first : own === baseline ? [make("span", { className: "quiet", textContent: "baseline" })]
        : ours ? [make("span", { className: ours[2], textContent: ours[0] }), make("small", { textContent: ours[1] })]
        : [make("span", { className: "quiet", textContent: "not compared" })];
      td.replaceChildren(...shown);
      (head.querySelector("button") ?? head).firstChild.textContent = alike ? `vs ${name}` : head.dataset.versus;
      delete td.dataset.text;
    }
    draw(figures);
  }

  function pickable() {
    for (const head of $$("#ranking th")) if (head.textContent.trim() === "vs best") head.dataset.versus = "vs best";
    for (const row of $$("#ranking tr[data-cells]")) {
      const cell = row.dataset.cells, title = [...row.cells].find(td => td.querySelector("a[href^='#cell-']"));
      if (!title || !data.versus[cell]) continue;
      const button = make("button", { type: "button", className: "pick", title: "Compare all others with this row" });
      button.setAttribute("aria-label", `Baseline: ${title.textContent}`);
      button.setAttribute("aria-pressed", "false");
      title.prepend(button);
      row.addEventListener("click", event => { if (!event.target.closest("a, button:not(.pick), summary")) pick(cell); });
    }
  }

  // --- sorting ---

  const UNITS = { KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
  function sortKey(cell) {
    const text = (cell.dataset.text ??= [...cell.childNodes].find(n => n.textContent.trim())?.textContent.trim() ?? "");
    const [, number, unit] = text.match(/^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*(KiB|MiB|GiB)?/) ?? [];
    if (number !== undefined) return [0, +number.replaceAll(",", "") * (UNITS[unit] ?? 1)];
    return text === "\u2013" || !text ? [2, 0] : [1, text.toLowerCase()]; // what is missing stays last
  }

  function sortBy(head, index) {
    const body = head.closest("table").tBodies[0], rows = [...body.rows];
    const up = head.ariaSort ? head.ariaSort === "descending" : !head.classList.contains("n") || head.textContent.startsWith("#");
    const keys = new Map(rows.map(row => [row, sortKey(row.cells[index])]));
    rows.sort((one, other) => {
      const [a, b] = [keys.get(one), keys.get(other)];
      return a[0] !== b[0] ? a[0] - b[0] : ((a[1] > b[1]) - (a[1] < b[1])) * (up ? 1 : -1);
    });
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.ariaSort = up ? "ascending" : "descending";
    body.append(...rows);
  }

  function sortable(table) {
    if (table.tBodies[0].rows.length < 2) return;
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      if (!head.textContent.trim()) return;
      const unit = head.querySelector("small");
      const button = make("button", { className: "sort", type: "button", textContent: head.firstChild.textContent });
      head.replaceChildren(button, ...(unit ? [unit] : []));
      button.addEventListener("click", () => sortBy(head, index));
    });
  }

  // --- hover and keyboard on charts ---

  const tip = make("div", { id: "tip", role: "status", hidden: true });
  document.body.append(tip);

  function tell(svg, mark) {
    svg.querySelector(".found")?.remove();
    tip.hidden = !mark;
    if (!mark) return;
    const p = mark.p, names = (p.runs ?? []).map(i => data.runs[i]);
    const more = names.length > MOST_RUNS_TOLD ? `, and ${names.length - MOST_RUNS_TOLD} more` : "";
    const over = baseline && p.y && data.charts.flatMap(c => c === svg.chart ? c.points : [])
      .find(q => q.cells[0] === baseline && q.group === p.group && (svg.chart.kind === "bars" ? !q.faint === !p.faint : q.drawn === "mark"));
    const ratio = over && over !== p ? `\n${d3.format(".3~r")(p.y / over.y)}x of ${data.names[baseline]} (no interval)` : "";
    tip.replaceChildren(make("b", { textContent: [p.label, p.group].filter(Boolean).join(", ") || p.series }), (p.detail ?? p.text ?? "") + ratio,
      ...(names.length ? [make("small", { textContent: `run${names.length > 1 ? "s" : ""} ${names.slice(0, MOST_RUNS_TOLD).join(", ")}${more}` })] : []));
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    for (const [name, value] of Object.entries({ class: "found", cx: mark.x, cy: mark.y, r: 5, fill: "none", stroke: "var(--ink)", "stroke-width": 2 }))
      ring.setAttribute(name, value);
    svg.append(ring);
    const at = svg.getBoundingClientRect(), scale = at.width / svg.viewBox.baseVal.width;
    const x = at.left + mark.x * scale, y = at.top + mark.y * scale, size = tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(x - size.width / 2, document.documentElement.clientWidth - size.width - 8));
    const top = y - size.height - 14 > 4 ? y - size.height - 14 : y + 18;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${top + scrollY}px`;
  }

  function hoverable({ svg, hits }, title) {
    let current = -1;
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("role", "img");
    for (const child of svg.children) child.setAttribute("aria-hidden", "true"); // the label and the tip tell it
    svg.setAttribute("aria-label", `${title}: ${hits.length} marks, arrow keys tell each`);
    const show = index => { current = index; tell(svg, hits[index]); };
    svg.addEventListener("pointermove", event => {
      const at = svg.getBoundingClientRect(), scale = at.width / svg.viewBox.baseVal.width;
      show(hits.indexOf(Charts.find(hits, (event.clientX - at.left) / scale, (event.clientY - at.top) / scale)));
    });
    svg.addEventListener("pointerleave", () => show(-1));
    svg.addEventListener("blur", () => show(-1));
    svg.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      show((Math.max(current, step < 0 ? 0 : -1) + step + hits.length) % hits.length);
    });
  }

  // --- charts ---

  const figures = $$("figure[data-chart]").map(element => {
    const chart = data.charts.find(c => c.name === element.dataset.chart);
    return { element, chart, place: element.querySelector(".plot"), room: 0, drawings: [] };
  });
  const pointsOf = figure => figure.chart.points.filter(p => anyKept(p.cells));

  function legend(chart, points) {
    const shown = new Set(points.map(p => p.series)), series = chart.series.filter(s => shown.has(s.name));
    const lanes = chart.kind === "bars" || chart.kind === "dots"; // these are named beside their lane
    const marks = points.filter(p => p.drawn !== "curve");
    const named = marks.length && marks.every(p => p.drawn === "mark" && p.text === p.series); // beside its mark
    if (lanes || named || series.length < 2) return [];
    const lined = new Set(points.filter(p => !["area", "mark", "lone", "ring"].includes(p.drawn)).map(p => p.series));
    const alike = d3.groups(series, s => `${s.colour} ${s.dashed ?? ""}`);
    return [make("div", { className: "legend" }, ...alike.map(([, [s, ...more]]) => {
      const stroke = chart.kind === "lines" && lined.has(s.name) ? "stroke" : "";
      const own = points.filter(p => p.series === s.name), round = own.every(p => ["mark", "lone"].includes(p.drawn)) ? "round" : "";
      const swatch = make("i", { className: `${stroke || round} ${s.dashed ? "dashed" : ""}` });
      swatch.style[stroke ? "borderColor" : "background"] = `var(--s${s.colour})`;
      // Beyond the palette several share a colour: one entry for all of them, whose marks tell their names.
      const names = [s, ...more].map(each => each.name);
      return make("span", more.length ? { title: names.join(", ") } : {}, swatch, more.length ? `${names.length} others` : s.name);
    }))];
  }

  // Charts near the window are drawn at once; the others when the browser is idle, so that a large page can be used first.
  const NEAR = 400, later = new Set();
  const idle = call => globalThis.requestIdleCallback ? requestIdleCallback(call, { timeout: 200 }) : setTimeout(call, 30);
  let waits = false;
  function next() {
    waits = false;
    const [figure] = later;
    if (figure) { later.delete(figure); drawNow(figure); }
    if (later.size) wait();
  }
  function wait() { if (!waits) { waits = true; idle(next); } }
  function drawAll() { for (const figure of later) drawNow(figure); later.clear(); }
  function draw(some) {
    for (const figure of some) figure.element.hidden = !pointsOf(figure).length;
    // Measured together: a drawing in between would have the whole page laid out again for each.
    const boxes = some.map(figure => figure.element.getBoundingClientRect());
    some.forEach((figure, i) => {
      if (boxes[i].top < innerHeight + NEAR && boxes[i].bottom > -NEAR) { later.delete(figure); drawNow(figure); }
      else later.add(figure);
    });
    if (later.size) wait();
  }
  const arrival = new IntersectionObserver(entries => {
    for (const entry of entries) {
      const figure = figures.find(f => f.element === entry.target);
      if (entry.isIntersecting && later.delete(figure)) drawNow(figure);
    }
  }, { rootMargin: `${NEAR}px` });
  addEventListener("beforeprint", drawAll);

  function drawNow(figure) {
    const points = pointsOf(figure);
    figure.element.hidden = !points.length;
    if (!points.length || !figure.room) return;
    figure.drawings = Charts.draw(figure.chart, points, figure.room);
    const rest = d3.sum(figure.drawings, d => d.rest);
    const made = figure.drawings.map(d => d.name ? make("div", {}, make("h4", { textContent: d.name }), d.svg) : d.svg);
    const panels = made.length > 1 ? [make("div", { className: "panels", style: `--columns: ${figure.drawings[0].columns}` }, ...made)] : made;
    figure.place.replaceChildren(...legend(figure.chart, points), ...panels,
      ...(rest ? [make("p", { className: "quiet", textContent: "More than fit a chart: the tables hold them all, a filter brings them here." })] : []));
    for (const drawing of figure.drawings) drawing.svg.chart = figure.chart;
    for (const drawing of figure.drawings) hoverable(drawing, [figure.chart.title, drawing.name].filter(Boolean).join(", "));
  }

  const watcher = new ResizeObserver(entries => {
    const changed = [];
    for (const entry of entries) {
      const figure = figures.find(f => f.place === entry.target), room = Math.floor(entry.contentRect.width);
      if (room && room !== figure.room) { figure.room = room; changed.push(figure); }
    }
    draw(changed);
    if (changed.length) performance.mark("paceline-drawn");
  });

  // --- copies and downloads ---

  function save(name, type, text) {
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // A text that begins like a formula would be run by a spreadsheet.
  const quoted = value => `"${String(value ?? "").replace(/^(?=[=+@\t\r-])/, "'").replaceAll('"', '""')}"`;

  function csv({ chart }, points) {
    const unit = chart.y.unit || chart.y.label, x = chart.x ? chart.x.label : "";
    const head = ["panel or group", "label", "series", ...(x ? [x] : []), `value (${unit})`, `low (${unit})`, `high (${unit})`, "cells", "runs"];
    const lines = points.flatMap(p => {
      const before = [quoted(p.group), quoted(p.label), quoted(p.series), ...(x ? [p.x ?? ""] : [])];
      const after = [quoted(p.cells.join(" ")), quoted((p.runs ?? []).map(i => data.runs[i]).join(" "))];
      const values = p.samples ? p.samples.map(v => [v, "", ""]) : [[p.y, p.low ?? "", p.high ?? ""]];
      return values.map(value => [...before, ...value, ...after].join(","));
    });
    return [head.map(quoted).join(","), ...lines, ""].join("\r\n");
  }

  /** One file with title and legend: colours of the theme are written out, since the file leaves the page. */
  function svgFile(figure) {
    if (later.delete(figure)) drawNow(figure);
    const probe = make("span");
    document.body.append(probe);
    const resolved = text => text.replace(/var\(--[a-z0-9]+\)/g, name => { probe.style.color = name; return getComputedStyle(probe).color; });
    const escaped = text => new XMLSerializer().serializeToString(document.createTextNode(text));
    const font = 'font-family="system-ui, sans-serif"', out = [];
    let y = 22, right = 0;
    out.push(`<text x="8" y="${y}" ${font} font-size="15" font-weight="600" fill="var(--ink)">${escaped(figure.chart.title)}</text>`);
    out.push(`<text x="8" y="${y += 18}" ${font} font-size="12" fill="var(--quiet)">${escaped(figure.chart.subtitle)}</text>`);
    for (const item of $$(".legend span", figure.place)) {
      const swatch = item.querySelector("i");
      out.push(`<rect x="8" y="${y + 8}" width="10" height="10" fill="${swatch.style.background || swatch.style.borderColor}"/>`,
        `<text x="24" y="${(y += 17)}" ${font} font-size="12" fill="var(--ink)">${escaped(item.textContent)}</text>`);
    }
    for (const { svg, name } of figure.drawings) {
      if (name) out.push(`<text x="8" y="${y += 24}" ${font} font-size="12" font-weight="600" fill="var(--ink)">${escaped(name)}</text>`);
      const copy = svg.cloneNode(true), box = svg.viewBox.baseVal;
      copy.querySelector(".found")?.remove();
      for (const [key, value] of [["x", 8], ["y", y + 8], ["width", box.width], ["height", box.height], ["overflow", "visible"]]) copy.setAttribute(key, value);
      out.push(new XMLSerializer().serializeToString(copy));
      y += box.height + 8;
      right = Math.max(right, box.width);
    }
    const ground = `<rect width="100%" height="100%" fill="var(--paper)"/>`;
    const size = `width="${right + 24}" height="${y + 8}"`;
    const text = resolved(`<svg xmlns="http://www.w3.org/2000/svg" ${size}>${ground}${out.join("")}</svg>`);
    probe.remove();
    return text;
  }

  async function copy(button, text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch { // a page from disk may be refused the clipboard: the old way still works
      const area = make("textarea", { value: text });
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    said(button, "Copied");
  }

  /** A word on a button for a moment. */
  function said(button, word) {
    const before = button.textContent;
    button.textContent = word;
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  const tool = (text, call) => {
    const button = make("button", { type: "button", textContent: text });
    button.addEventListener("click", () => call(button));
    return button;
  };

  /** The chart as a PNG at twice its size, in the clipboard where the browser allows it, else as a file. */
  async function png(button, figure) {
    const image = new Image();
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgFile(figure))}`;
    await image.decode();
    const canvas = make("canvas", { width: 2 * image.width, height: 2 * image.height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise(done => canvas.toBlob(done, "image/png"));
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": blob })]);
      said(button, "Copied");
    } catch {
      save(`${figure.chart.name}.png`, "image/png", blob);
      said(button, "Saved");
    }
  }

  /** A table as Markdown: visible rows only, details in brackets behind their values. */
  function markdown(table) {
    const bar = text => text.replaceAll("|", "\\|").replace(/\s+/g, " ").trim();
    const words = cell => bar([...cell.childNodes].map(node => node.textContent).join(" "));
    const heads = [...table.tHead.rows[0].cells];
    const lines = [heads.map(words), heads.map(head => head.classList.contains("n") ? "---:" : "---")];
    for (const row of table.tBodies[0].rows) if (!row.hidden) lines.push([...row.cells].map(words));
    return lines.map(cells => `| ${cells.join(" | ")} |`).join("\n") + "\n";
  }

  for (const figure of figures)
    figure.element.append(make("div", { className: "tools" },
      tool("CSV", () => save(`${figure.chart.name}.csv`, "text/csv", csv(figure, pointsOf(figure)))),
      tool("SVG", () => save(`${figure.chart.name}.svg`, "image/svg+xml", svgFile(figure))),
      tool("PNG", button => png(button, figure))));
  for (const table of $$(".scroll > table"))
    table.parentElement.after(make("div", { className: "tools table-tools" }, tool("Copy as Markdown", button => copy(button, markdown(table)))));
  for (const panel of $$("details.cell"))
    panel.querySelector("summary").after(make("div", { className: "tools" },
      tool("Copy link", button => copy(button, `${location.href.split("#")[0]}#${panel.id}`))));
  for (const recipe of $$(".recipe")) {
    const text = recipe.querySelector("pre").textContent, file = recipe.dataset.file;
    recipe.append(make("div", { className: "tools" }, tool("Copy", button => copy(button, text)),
      ...(file ? [tool("Save", () => save(file, "text/yaml", text))] : [])));
  }

  // A link to something folded opens it.
  const unfold = () => {
    for (let e = document.getElementById(decodeURIComponent(location.hash.slice(1))); e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
  };
  addEventListener("hashchange", unfold);
  document.addEventListener("click", event => { if (event.target.closest('a[href^="#cell-"]')) setTimeout(unfold); });

  const MOST_CARDS = 8, FEW_MORE = 4; // the first is as in page.css
  /** On a phone each row is a card that names its values; the first text is its title. */
  function cards(table) {
    const heads = [...table.tHead.rows[0].cells].map(head => head.textContent === "#" ? "rank" : [...head.childNodes].map(n => n.textContent).join(", "));
    if (heads.length < 3) return;
    table.classList.add("cards");
    const title = [...table.tHead.rows[0].cells].findIndex(head => !head.classList.contains("n"));
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, i) => {
      if (i === title) cell.classList.add("title"); else cell.dataset.label = heads[i];
      if (heads[i] === "rank" && /\d/.test(cell.textContent)) row.cells[title].dataset.rank = cell.textContent;
    });
    const count = table.tBodies[0].rows.length;
    if (count <= MOST_CARDS + FEW_MORE) return;
    table.classList.add("long");
    const more = tool(`Show all ${count}`, () => { table.classList.remove("long"); more.remove(); });
    more.className = "more-cards";
    (table.parentElement.nextElementSibling?.matches(".table-tools") ? table.parentElement.nextElementSibling : table.parentElement).append(more);
  }

  pickable();
  const dress = table => { cards(table); sortable(table); };
  $$("table").forEach(dress);
  globalThis.Paceline = { dress }; // for scripts that add tables later
  filterBar();
  figures.forEach(figure => { watcher.observe(figure.place); arrival.observe(figure.element); });
  apply();
  unfold();
})();
