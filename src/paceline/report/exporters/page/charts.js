"use strict";
// Draws the charts the page holds as data. Every number and word was made by the report; here are only pixels.
const Charts = (() => {
  const MOST_LANES = 60;          // as many as a reader can look through; a filter brings the others
  const STRAGGLER_RATIO = 1.35;   // steps slower than this times the slowest lane's 95th percentile are counted, not drawn
  const MOST_NUMBERED = 10;       // more numbers than this on one set of curves would cover them
  const MOST_NUMBERED_RANKS = 16;
  const LINE = 15;                // pixels of a line of text
  const GAP = 24;                 // between panels, as in page.css
  const LANES_PX = 420;           // the least width of one of several columns of lanes
  const FEWEST_LANES = 6;         // of one of several columns
  const style = { fontSize: "12px", background: "none", color: "var(--ink)", overflow: "visible" };

  const halo = { fill: "var(--ink)", stroke: "var(--paper)", strokeWidth: 4 }; // of texts: lines behind them end there

  const colours = chart => new Map(chart.series.map(s => [s.name, `var(--s${s.colour})`]));
  const spoken = v => Math.abs(v) >= 1e4 && v % 100 === 0 ? d3.format("~s")(v) : d3.format(",~g")(+v.toPrecision(6));
  const ruler = document.createElement("canvas").getContext("2d");

  /** Pixels of a text as the charts write it: fonts differ too much between systems to count letters. */
  const widths = new Map();
  let family = "";
  function width(text, weight = 400) {
    const key = `${weight} ${text}`;
    if (!widths.has(key)) {
      // Asking for the style of a large page takes long, so it is asked for once.
      family ||= getComputedStyle(document.body).fontFamily;
      ruler.font = `${weight} 12px ${family}`;
      widths.set(key, ruler.measureText(text).width);
    }
    return widths.get(key);
  }

  /** Lines that fit the room, broken between words and options, and within a word that is longer than a line. */
  function wrapped(text, room, weight) {
    const lines = [""];
    for (const piece of text.split(/(?<= )|(?<=,)(?=[a-z_])/)) {
      const longer = lines.at(-1) + piece;
      if (width(longer.trimEnd(), weight) <= room) { lines[lines.length - 1] = longer; continue; }
      if (lines.at(-1)) lines.push("");
      for (const letter of piece)
        if (width(lines.at(-1) + letter, weight) <= room || !lines.at(-1)) lines[lines.length - 1] += letter; else lines.push(letter);
    }
    return lines.map(line => line.trimEnd());
  }

  /** Columns of so many panels, none narrower than asked, and all rows alike: 8 in two rows of 4, not of 5 and 3. */
  function columnsOf(count, room, least) {
    const most = Math.max(1, Math.min(count, Math.floor((room + GAP) / (least + GAP))));
    const columns = Math.ceil(count / Math.ceil(count / most));
    return { columns, each: (room - GAP * (columns - 1)) / columns };
  }

  function bytes(value) {
    const [size, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]].find(([s]) => value >= s) ?? [1, "B"];
    return `${+(value / size).toPrecision(4)} ${unit}`;
  }

  // --- lanes: bars, parts, samples ---

  /** Points in rows under the headings of their groups; y is in pixels from the top. Labels go above where room is short. */
  function layout(points, room) {
    const above = d3.max(points, p => width(p.label)) > 0.42 * room;
    const lanes = new Map(), headings = [];
    let y = 0, group = null, rest = 0;
    for (const p of points) {
      const key = JSON.stringify([p.group, p.label, !!p.faint]);
      if (!lanes.has(key)) {
        if (lanes.size >= MOST_LANES) { rest += 1; continue; }
        if (p.group && p.group !== group) {
          const lines = wrapped(p.group, room - 8, 600);
          headings.push({ y: y + 5, text: lines.join("\n") });
          y += 10 + LINE * lines.length;
        }
        group = p.group;
        const label = p.faint ? [] : above ? wrapped(p.label, room - 8) : [p.label];
        if (above) y += LINE * label.length + (label.length ? 4 : 0);
        lanes.set(key, { y, height: p.faint ? 9 : 20, label: label.join("\n"), points: [] });
        y += p.faint ? 14 : above ? 25 : 26;
        if (p.faint) y += 3; else if (points.some(q => q.faint)) y -= 4;
      }
      lanes.get(key).points.push(p);
    }
    const rows = [...lanes.values()];
    return { rows, headings, above, rest, height: y, left: above ? 4 : 12 + d3.max(rows, r => width(r.label)) };
  }

  function scaleMarks(ticks) {
    return [
      Plot.gridX({ ticks, stroke: "var(--line)", strokeOpacity: 1 }),
      Plot.axisX({ anchor: "bottom", ticks, tickSize: 0, label: null, tickFormat: spoken, color: "var(--quiet)" }),
    ];
  }

  function nameMarks(plan) {
    const names = plan.rows.filter(r => r.label);
    return [
      plan.above
        ? Plot.text(names, { frameAnchor: "left", y: r => r.y - 5, text: "label", textAnchor: "start", lineAnchor: "bottom", lineHeight: LINE / 12, ...halo })
        : Plot.text(names, { frameAnchor: "left", y: r => r.y + r.height / 2, text: "label", textAnchor: "end", dx: -8 }),
      Plot.text(plan.headings, {
        frameAnchor: "left", y: "y", text: "text", textAnchor: "start", lineAnchor: "top", lineHeight: LINE / 12,
        ...halo, fill: "var(--quiet)", fontWeight: 600, dx: plan.above ? 0 : 4 - plan.left,
      }),
    ];
  }

  function lanePlot(plan, room, domain, axis, marks) {
    const margin = { marginLeft: plan.left, marginRight: 8, marginTop: 4, marginBottom: 40 };
    const ticks = Math.max(3, Math.floor((room - plan.left) / 65));
    return Plot.plot({
      ...margin, width: room, height: plan.height + 44, style,
      x: { domain, axis: null }, y: { domain: [0, plan.height], range: [4, plan.height + 4], axis: null },
      marks: [...scaleMarks(ticks), ...marks, ...nameMarks(plan), Plot.text([axis.label], {
        frameAnchor: "bottom-right", text: d => d, dy: 33, textAnchor: "end", fill: "var(--quiet)" })],
    });
  }

  /** The end of an axis that leaves room for the longest number beside its mark. */
  function reach(ends, texts, inner, least = 0) {
    const top = Math.max(d3.max(ends), least) || 1;
    const share = d3.max(ends.map((end, i) => [end, width(texts[i] ?? "") + 14]), ([end, px]) => end / (1 - Math.min(px / inner, .6)));
    return Math.max(top * 1.02, share);
  }

  function ruleMarks(rules) {
    return rules.flatMap(rule => [
      Plot.ruleX([rule.y], { stroke: "var(--ink)", strokeDasharray: "4 3" }),
      Plot.text([rule], { x: "y", frameAnchor: "bottom", dy: -2, dx: -5, text: "label", textAnchor: "end", ...halo }),
    ]);
  }

  /** Lanes beside each other in columns on the same scale, where many would make one tall column. */
  function inColumns(draw) {
    return (chart, points, room) => {
      const name = p => JSON.stringify([p.group, p.label]), lanes = [...new Set(points.map(name))].slice(0, MOST_LANES);
      const { columns, each } = columnsOf(Math.max(1, Math.floor(lanes.length / FEWEST_LANES)), room, LANES_PX);
      if (columns === 1) return draw(chart, points, room, points);
      const at = new Map(lanes.map((lane, i) => [lane, Math.floor(i * columns / lanes.length)]));
      const found = d3.range(columns).map(i => ({ ...draw(chart, points.filter(p => at.get(name(p)) === i), each, points), columns }));
      found.at(-1).rest = points.filter(p => !at.has(name(p))).length;
      return found;
    };
  }

  function bars(chart, points, room, all) {
    const plan = layout(points, room), fill = colours(chart);
    if (chart.rules?.length) plan.height += 18;
    const end = p => Math.max(p.y, p.high ?? 0, p.expected ?? 0);
    const marks = plan.rows.map(r => ({ ...r, p: r.points[0], end: end(r.points[0]) }));
    const wide = marks.filter(m => m.p.low != null && m.p.high > m.p.low);
    const domain = [0, reach(all.map(end), all.map(p => p.text), room - plan.left - 8,
      d3.max(chart.rules ?? [], r => r.y) ?? 0)];
    const svg = lanePlot(plan, room, domain, chart.y, [
      Plot.rect(marks, { x1: 0, x2: m => m.p.y, y1: "y", y2: m => m.y + m.height, fill: m => fill.get(m.p.series) }),
      Plot.ruleY(wide, { y: m => m.y + m.height / 2, x1: m => m.p.low, x2: m => m.p.high, stroke: "var(--ink)", strokeWidth: 1.3 }),
      ...["low", "high"].map(end => Plot.ruleX(wide, { x: m => m.p[end], y1: m => m.y + 6, y2: m => m.y + m.height - 6,
        stroke: "var(--ink)", strokeWidth: 1.3 })),
      Plot.ruleX(marks.filter(m => m.p.expected != null), { x: m => m.p.expected, y1: "y", y2: m => m.y + m.height,
        stroke: "var(--ink)", strokeWidth: 2 }),
      Plot.text(marks, { x: "end", y: m => m.y + m.height / 2, text: m => m.p.text, textAnchor: "start", dx: 7, ...halo }),
      ...ruleMarks(chart.rules ?? []),
    ]);
    return drawn(svg, marks.map(m => hit(m.p, svg, m.p.y, m.y + m.height / 2, m)), plan);
  }

  function stack(chart, points, room, all) {
    const plan = layout(points, room), fill = colours(chart);
    if (chart.rules?.length) plan.height += 18;
    const stacked = row => {
      let from = 0;
      return row.points.map(p => ({ p, row, from, to: (from += p.y) }));
    };
    const parts = plan.rows.flatMap(stacked), ends = parts.filter(part => part.p.text);
    const others = (all === points ? plan : layout(all, room)).rows.flatMap(stacked).filter(part => part.p.text);
    const domain = [0, reach(others.map(e => e.to), others.map(e => e.p.text), room - plan.left - 8,
      d3.max(chart.rules ?? [], r => r.y) ?? 0)];
    const svg = lanePlot(plan, room, domain, chart.y, [
      Plot.rect(parts, { x1: "from", x2: "to", y1: d => d.row.y, y2: d => d.row.y + d.row.height,
        fill: d => fill.get(d.p.series), fillOpacity: d => d.p.faint ? .5 : 1, insetRight: .5 }),
      Plot.text(ends, { x: "to", y: d => d.row.y + d.row.height / 2, text: d => d.p.text, textAnchor: "start", dx: 7,
        ...halo, fill: d => d.p.faint ? "var(--quiet)" : "var(--ink)", fontSize: 11.5 }),
      ...ruleMarks(chart.rules ?? []),
    ]);
    return drawn(svg, parts.map(d => hit(d.p, svg, (d.from + d.to) / 2, d.row.y + d.row.height / 2,
      { ...d.row, from: svg.scale("x").apply(d.from), to: svg.scale("x").apply(d.to) })), plan);
  }

  /** Intervals on both sides of a rule; a drawing per group, whose numbers have nothing to do with the others'. */
  function spans(chart, points, room) {
    const groups = d3.groups(points.slice(0, MOST_LANES), p => p.group ?? "");
    const { columns, each } = columnsOf(groups.length, room, LANES_PX);
    const found = groups.map(([, ours]) => ({ ...spanLanes(chart, ours, each), columns }));
    found.at(-1).rest = Math.max(0, points.length - MOST_LANES);
    return found;
  }

  function spanLanes(chart, points, room) {
    const plan = layout(points, room), fill = colours(chart), rules = chart.rules ?? [];
    const marks = plan.rows.map(r => ({ ...r, p: r.points[0], low: r.points[0].low ?? r.points[0].y, high: r.points[0].high ?? r.points[0].y }));
    // Noise of a hundredth of a percent must not fill the room.
    const [least, most] = d3.extent([...marks.flatMap(m => [m.low, m.high]), ...rules.map(r => r.y), ...(chart.y.unit === "%" ? [-1, 1] : [])]);
    const edge = (most - least) * .04 || 1, inner = room - plan.left - 8;
    const beside = d3.max(marks, m => width(m.p.text)) + 16;
    const end = least - edge + (most - least + 2 * edge) / (1 - Math.min(beside / inner, .5));
    const svg = lanePlot(plan, room, [least - edge, end], chart.y, [
      ...rules.map(rule => Plot.ruleX([rule.y], { stroke: "var(--ink)", strokeDasharray: "4 3" })),
      Plot.ruleY(marks, { y: m => m.y + m.height / 2, x1: "low", x2: "high", stroke: m => fill.get(m.p.series), strokeWidth: 2.2 }),
      Plot.dot(marks, { x: m => m.p.y, y: m => m.y + m.height / 2, r: 4, fill: m => fill.get(m.p.series) }),
      Plot.text(marks, { x: most + edge, y: m => m.y + m.height / 2, text: m => m.p.text, textAnchor: "start", dx: 6, ...halo }),
    ]);
    return drawn(svg, marks.map(m => hit(m.p, svg, m.p.y, m.y + m.height / 2, m)), plan);
  }

  /** A drawing per group: their steps differ by far more than the steps of one group, which is what the eye is for. */
  function dots(chart, points, room) {
    const groups = d3.groups(points.slice(0, MOST_LANES), p => p.group ?? "");
    const { columns, each } = columnsOf(groups.length, room, LANES_PX);
    const found = groups.map(([, ours]) => ({ ...spread(chart, ours, each), columns }));
    found.at(-1).rest = Math.max(0, points.length - MOST_LANES);
    return found;
  }

  function spread(chart, points, room) {
    const plan = layout(points, room), fill = colours(chart);
    for (const [i, row] of plan.rows.entries()) { row.y += 8 * i; row.height = 26; }
    plan.height += 8 * plan.rows.length;
    const lanes = plan.rows.map(row => {
      const all = row.points[0].samples, q = f => d3.quantile(all, f);
      return { ...row, p: row.points[0], all, box: [.05, .25, .5, .75, .95].map(q) };
    });
    const limit = STRAGGLER_RATIO * d3.max(lanes, s => s.box[4]);
    const shown = lanes.flatMap(s => s.all.filter(v => v <= limit).map((v, i) => ({ v, s, at: s.y + 15 + 11 * ((i * .618034) % 1) })));
    const [least, most] = d3.extent(shown, d => d.v);
    const text = s => { const n = s.all.filter(v => v > limit).length; return s.p.text + (n ? `, +${n} slower` : ""); };
    const edge = (most - least) * .03 || most * .05;
    const inner = room - plan.left - 8, beside = d3.max(lanes, s => width(text(s))) + 16;
    const domain = [least - edge, least - edge + (most - least + 2 * edge) / (1 - Math.min(beside / inner, .5))];
    const svg = lanePlot(plan, room, domain, chart.y, [
      Plot.dot(shown, { x: "v", y: "at", r: 2, fill: d => fill.get(d.s.p.series), fillOpacity: .45 }),
      Plot.ruleY(lanes, { y: s => s.y + 6, x1: s => s.box[0], x2: s => s.box[4], stroke: "var(--ink)" }),
      Plot.rect(lanes, { x1: s => s.box[1], x2: s => s.box[3], y1: s => s.y + 1, y2: s => s.y + 11,
        fill: s => fill.get(s.p.series), stroke: "var(--ink)", strokeWidth: .8 }),
      Plot.ruleX(lanes, { x: s => s.box[2], y1: s => s.y - 2, y2: s => s.y + 14, stroke: "var(--ink)", strokeWidth: 2 }),
      Plot.text(lanes, { x: most + edge, y: s => s.y + 7, text, textAnchor: "start", dx: 6, ...halo }),
    ]);
    return drawn(svg, lanes.map(s => hit(s.p, svg, s.box[2], s.y + 6, s)), plan);
  }

  // --- curves ---

  /** Percent as the number of nines: 90, 99 and 99.9 are equally far apart. */
  const nines = percent => -Math.log10(1 - percent / 100);
  const percent = nines => +(100 - 100 * 10 ** -nines).toFixed(4);

  function span(values, axis, whole = false) {
    const [low, high] = d3.extent(values);
    if (whole && axis.scale === "log2") // whole powers, so that there are marks to read from
      return [2 ** Math.floor(Math.log2(low / 1.05)), 2 ** Math.ceil(Math.log2(high * 1.05))];
    if (axis.scale === "nines") return [0, nines(high)];
    if (axis.scale !== "linear") return [low / 1.2, high * 1.2];
    const edge = .05 * (high - low);
    return axis.zero === false ? [low - edge, high + edge] : [Math.min(0, low), high * 1.06 || 1];
  }

  /** Whole powers on a logarithmic axis, with 2 and 5 between where these are few; else as many as read well. */
  function marksOf(axis, [low, high]) {
    if (axis.scale === "linear") return 5;
    const within = values => values.filter(v => v >= low && v <= high);
    if (axis.scale === "log2") return within(d3.range(0, 40).map(k => 2 ** k));
    const powers = d3.range(-12, 16).map(k => 10 ** k), whole = within(powers);
    const finer = within(powers.flatMap(v => [v, 2 * v, 5 * v]));
    if (finer.length < 3) return d3.ticks(low, high, 4);
    if (whole.length < 3) return finer;
    const every = Math.ceil(whole.length / 6);
    return whole.filter((_, i) => i % every === 0);
  }

  function xTicks(values, axis, room) {
    const all = [...new Set(values)].sort(d3.ascending);
    if (axis.scale === "nines") return [0, 50, 90, 99, 99.9, 99.99, 99.999].filter(v => v <= all.at(-1) + 1e-9);
    const most = Math.max(2, Math.floor(room / (axis.ticks === "bytes" ? 62 : 46)));
    if (axis.ticks === "bytes" && all.length > most) {
      const [low, high] = d3.extent(all, v => Math.log2(v));
      for (const every of [5, 10, 20]) {
        const kept = d3.range(0, 51, every).filter(k => k >= low && k <= high).map(k => 2 ** k);
        if (kept.length <= most) return kept;
      }
    }
    if (axis.scale === "log") return marksOf(axis, d3.extent(all));
    const edge = .04 * (all.at(-1) - all[0]); // a range that begins just behind a round number shows that number
    const whole = values => all.every(Number.isInteger) ? values.filter(Number.isInteger) : values; // no half steps
    if (axis.ticks === "round") return whole(d3.ticks(axis.zero === false ? all[0] - edge : Math.min(0, all[0]), all.at(-1), Math.min(most, 6)));
    if (axis.scale === "linear" && all.length > most) return d3.ticks(all[0] - edge, all.at(-1), Math.min(most, 6));
    const every = Math.ceil(all.length / most);
    return all.filter((_, i) => i % every === 0);
  }

  /** Where a point will stand, in pixels of its panel. */
  function pixelsOf(p, x, chart, domains, width, height) {
    const share = (v, [low, high], axis) => axis.scale.startsWith("log") ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
    return [share(x(p), domains.x, chart.x) * width, (1 - share(p.y, domains.y, chart.y)) * height];
  }

  /** Points whose texts do not touch that of one before them. */
  function apart(points, pixels) {
    const kept = [];
    for (const p of points) {
      const [x, y] = pixels(p), half = width(p.text) / 2 + 3;
      if (kept.every(k => Math.abs(k.x - x) > k.half + half || Math.abs(k.y - y) > 14)) kept.push({ p, x, y, half });
    }
    return kept.map(k => k.p);
  }

  /** A place beside each mark for its name: the first of right, left, above and below that is free. */
  function named(points, pixels, room) {
    const boxes = points.map(p => { const [x, y] = pixels(p); return { from: x - 7, to: x + 7, top: y - 7, bottom: y + 7 }; });
    const found = [];
    for (const p of points.filter(q => q.text)) {
      const [x, y] = pixels(p), long = width(p.text) * 13 / 12;
      const places = [[10, 0, "start"], [-10, 0, "end"], [0, -15, "middle"], [0, 15, "middle"], [10, -12, "start"], [10, 12, "start"], [-10, -12, "end"], [-10, 12, "end"]];
      for (const [dx, dy, textAnchor] of places) {
        const from = x + dx - (textAnchor === "end" ? long : textAnchor === "middle" ? long / 2 : 0);
        const box = { from, to: from + long, top: y + dy - 7, bottom: y + dy + 7 };
        if (box.to > room + 10 || from < 2) continue;
        if (boxes.some(b => b.from < box.to && box.from < b.to && b.top < box.bottom && box.top < b.bottom)) continue;
        boxes.push(box);
        found.push({ p, dx, dy, textAnchor });
        break;
      }
    }
    return found;
  }

  /** Lines at moments, each named at its top on the side with more room, unless an earlier name is there. */
  function uprights(rules, [low, high], room) {
    const places = [];
    for (const r of rules) {
      const at = (r.y - low) / (high - low) * room, turned = width(r.label) + 6 > room - at && room - at < .4 * room;
      const lines = wrapped(r.label, Math.max(turned ? at : room - at, 60) - 6), long = d3.max(lines, line => width(line)) + 6;
      const from = turned ? at - long : at;
      if (places.every(p => from > p.from + p.long || from + long < p.from)) places.push({ y: r.y, label: lines.join("\n"), from, long, turned });
    }
    const text = { x: "y", frameAnchor: "top", dy: 2, text: "label", lineHeight: LINE / 12, fill: "var(--ink)", stroke: "var(--paper)", strokeWidth: 4 };
    const named = turned => places.filter(p => p.turned === turned);
    return [
      Plot.ruleX(rules, { x: "y", stroke: "var(--ink)", strokeDasharray: "2 3" }),
      Plot.text(named(false), { ...text, textAnchor: "start", dx: 4 }),
      Plot.text(named(true), { ...text, textAnchor: "end", dx: -4 }),
    ];
  }

  /** The name of each stretch of a curve: where nothing was seen for a while, or another run begins, a new one begins. */
  function stretches(points) {
    const found = new Map();
    for (const ours of d3.group(points, p => p.series).values()) {
      const usual = d3.median(d3.pairs(ours, (a, b) => b.x - a.x).filter(gap => gap > 0)) ?? 0;
      let stretch = 0;
      ours.forEach((p, i) => { const gap = i ? p.x - ours[i - 1].x : 0; if (gap < 0 || gap > 1.6 * usual) stretch += 1; found.set(p, `${stretch} ${p.series}`); });
    }
    return found;
  }

  function curves(chart, points, room, domains, height) {
    const stroke = colours(chart), dashed = new Set(chart.series.filter(s => s.dashed).map(s => s.name));
    const kind = name => points.filter(p => (p.drawn ?? "joined") === name);
    const joined = kind("joined"), wide = joined.filter(p => p.low != null && p.high > p.low);
    const place = chart.x.scale === "nines" ? nines : v => v, x = p => place(p.x);
    const scale = axis => ({ type: axis.scale === "linear" || axis.scale === "nines" ? "linear" : "log", ...(axis.scale === "log2" ? { base: 2 } : {}) });
    // From bytes to gigabytes per second, prefixes are shorter than zeros.
    const isRate = chart.y.unit === "GB/s" && chart.y.scale !== "linear" && domains.y[0] < .01;
    const tick = axis => axis.scale === "nines" ? v => spoken(percent(v)) : axis.ticks === "bytes" ? bytes : spoken;
    const rules = (chart.rules ?? []).filter(r => !r.group || r.group === (points[0].group ?? ""));
    const levels = rules.filter(r => !r.upright), trails = kind("trail"), stretch = stretches(trails);
    const line = { x, y: "y", z: "series", stroke: p => stroke.get(p.series), strokeWidth: 1.8 };
    const crowded = chart.section === "served", texts = [...joined, ...(crowded ? kind("ring") : [])].filter(p => p.text);
    const numbers = crowded ? apart(texts, p => pixelsOf(p, x, chart, domains, room - 60, height - 64))
      : texts.length <= MOST_NUMBERED ? joined : [];
    const marks = kind("mark"), pixels = p => pixelsOf(p, x, chart, domains, room - 60, height - 64);
    const yTicks = marksOf(chart.y, domains.y), ticks = xTicks(points.map(p => p.x), chart.x, room - 60);
    const svg = Plot.plot({
      width: room, height, style, marginLeft: 46, marginBottom: 40, marginTop: 24, marginRight: 14,
      x: { ...scale(chart.x), domain: domains.x, axis: null }, y: { ...scale(chart.y), domain: domains.y, axis: null },
      marks: [
        Plot.gridY({ ticks: yTicks, stroke: "var(--line)", strokeOpacity: 1 }),
        Plot.axisY({ ticks: yTicks, tickSize: 0, label: null, tickFormat: isRate ? v => d3.format("~s")(v * 1e9) : spoken, color: "var(--quiet)" }),
        Plot.axisX({ ticks: ticks.map(place), tickSize: 4, label: null, tickFormat: tick(chart.x), color: "var(--quiet)" }),
        Plot.text([chart.x.label], { frameAnchor: "bottom-right", text: d => d, dy: 33, textAnchor: "end", fill: "var(--quiet)" }),
        Plot.text([isRate ? "B/s" : chart.y.label], { frameAnchor: "top-left", text: d => d, dy: -20, dx: -40, textAnchor: "start", fill: "var(--quiet)" }),
        Plot.areaY(kind("area"), { x, y1: "low", y2: "high", z: "series", fill: p => stroke.get(p.series), fillOpacity: p => stroke.get(p.series) === "var(--s15)" ? .2 : .75 }),
        ...uprights(rules.filter(r => r.upright), domains.x, room - 60),
        Plot.ruleY(levels, { y: "y", stroke: "var(--ink)", strokeDasharray: "4 3" }),
        Plot.rect((chart.spans ?? []).filter(s => s.group === (points[0].group ?? "")), {
          x1: s => Math.max(s.start, domains.x[0]), x2: s => Math.min(s.end, domains.x[1]), y1: domains.y[0], y2: domains.y[1],
          fill: "var(--s14)", fillOpacity: .14 }),
        Plot.line(joined.filter(p => !dashed.has(p.series)), line),
        Plot.line(joined.filter(p => dashed.has(p.series)), { ...line, strokeDasharray: "4 3" }),
        Plot.line(kind("curve").filter(p => !dashed.has(p.series)), { ...line, strokeWidth: 1.3 }),
        Plot.line(kind("curve").filter(p => dashed.has(p.series)), { ...line, strokeWidth: 1.3, strokeDasharray: "5 4" }),
        Plot.ruleX(marks.filter(p => p.low != null), { x, y1: "low", y2: "high", stroke: p => stroke.get(p.series), strokeWidth: 1.6 }),
        Plot.dot(marks, { x, y: "y", r: 6, fill: p => stroke.get(p.series), stroke: "var(--paper)", strokeWidth: 1.5 }),
        ...named(marks, pixels, room - 60).map(({ p, dx, dy, textAnchor }) => Plot.text([p], { x, y: "y", text: "text", dx, dy, textAnchor,
          fill: "var(--ink)", stroke: "var(--paper)", strokeWidth: 4, fontSize: 13 })),
        Plot.line(trails.filter(p => !dashed.has(p.series)), { ...line, z: p => stretch.get(p), strokeWidth: 1.5 }),
        Plot.line(trails.filter(p => dashed.has(p.series)), { ...line, z: p => stretch.get(p), strokeWidth: 1.5, strokeDasharray: "4 3" }),
        Plot.ruleX(wide, { x, y1: "low", y2: "high", stroke: p => stroke.get(p.series), strokeWidth: 1.3 }),
        Plot.dot(joined, { x, y: "y", r: 3.2, fill: p => stroke.get(p.series) }),
        Plot.dot(kind("lone"), { x, y: "y", r: 2.4, fill: p => stroke.get(p.series), fillOpacity: .8 }),
        Plot.dot(kind("ring"), { x, y: "y", r: 6, stroke: p => stroke.get(p.series), strokeWidth: 1.5 }),
        Plot.text(numbers, { x, y: "y", text: "text", dy: crowded ? -11 : 15, fill: "var(--ink)", stroke: "var(--paper)", strokeWidth: 3 }),
        ...levels.map((r, i) => Plot.text([r], { y: "y", ...(crowded ? { frameAnchor: "left", textAnchor: "start", dx: 4 + d3.sum(levels.slice(0, i), l => width(l.label) + 10) }
          : { frameAnchor: "right", textAnchor: "end" }), text: "label", dy: -8, stroke: "var(--paper)", strokeWidth: 3, fill: "var(--ink)" })),
      ],
    });
    const hits = points.filter(p => p.drawn !== "curve").map(p => hit(p, svg, x(p), p.y, null, svg.scale("y").apply(p.y)));
    return drawn(svg, hits, {});
  }

  function lines(chart, points, room) {
    const apart = chart.x.shared === false;
    const panels = d3.group(points, p => p.group ?? "");
    const level = (chart.rules ?? []).filter(r => !r.upright);
    const heights = ours => ours.flatMap(p => [p.y, ...(p.drawn === "curve" ? [] : [p.low ?? p.y, p.high ?? p.y])]);
    const domains = { x: span(points.map(p => p.x), chart.x), y: span([...heights(points), ...level.map(r => r.y)], chart.y, true) };
    const tall = (ours, name) => chart.y.shared !== false ? domains.y
      : span([...heights(ours), ...level.filter(r => !r.group || r.group === name).map(r => r.y)], chart.y, true);
    if (panels.size === 1) return [curves(chart, points, room, domains, room > 1000 ? 260 : Math.min(300, Math.max(240, room * .55)))];
    const { columns, each } = columnsOf(panels.size, room, chart.panel_px ?? 240);
    const within = (ours, name) => ({ x: apart ? span(ours.map(p => p.x), chart.x) : domains.x, y: tall(ours, name) });
    const high = Math.min(280, Math.max(200, each * .48));
    return [...panels].map(([name, ours]) => ({ ...curves(chart, ours, each, within(ours, name), high), name, columns }));
  }

  // --- matrix ---

  function heat(chart, points, room) {
    const ranks = [...new Set(points.map(p => +p.label))].sort(d3.ascending);
    const side = Math.min(44, Math.max(9, (Math.min(room, 560) - 60) / ranks.length));
    const paint = d3.scaleLinear([50, 80, 95, 105], ["#b42318", "#f0d3cf", "#e6e4f2", "#aba6d6"]).clamp(true);
    const numbers = ranks.length <= MOST_NUMBERED_RANKS && side >= 30 ? points : [];
    const every = Math.ceil(ranks.length / 16);
    const shared = { domain: ranks, axis: null, padding: .05 };
    const ticks = ranks.filter((_, i) => i % every === 0);
    const svg = Plot.plot({
      width: 50 + side * ranks.length + 10, height: 40 + side * ranks.length, style,
      marginLeft: 50, marginRight: 10, marginTop: 4, marginBottom: 36, x: shared, y: shared,
      marks: [
        Plot.cell(points, { x: "x", y: p => +p.label, fill: p => paint(p.y) }),
        Plot.text(numbers, { x: "x", y: p => +p.label, text: "text", fill: p => p.y < 62 ? "#fdfdfd" : "#111111", fontSize: 11 }),
        Plot.axisY(ticks, { tickSize: 0, label: null, color: "var(--quiet)" }),
        Plot.axisX(ticks, { tickSize: 0, label: null, color: "var(--quiet)" }),
        Plot.text([chart.x.label], { frameAnchor: "bottom", text: d => d, dy: 30, fill: "var(--quiet)" }),
      ],
    });
    const half = svg.scale("x").bandwidth / 2;
    const marks = points.map(p => hit(p, svg, p.x, 0, null, svg.scale("y").apply(+p.label) + half, half));
    return drawn(svg, marks, {});
  }

  // --- what the pointer and the keyboard find ---

  function hit(p, svg, x, y, lane, py = y + 4, shift = 0) {
    return { p, x: svg.scale("x").apply(x) + shift, y: py, lane };
  }

  function drawn(svg, hits, plan) {
    return { svg, hits, rest: plan.rest ?? 0 };
  }

  /** The mark under a place: in its lane by row and extent, elsewhere the nearest within reach. */
  function find(hits, x, y) {
    const lanes = hits.filter(h => h.lane && y >= h.lane.y + 1 && y <= h.lane.y + h.lane.height + 8);
    if (hits[0]?.lane) return lanes.find(h => h.lane.from == null || (x >= h.lane.from && x < h.lane.to)) ?? null;
    const near = d3.least(hits, h => Math.hypot(h.x - x, h.y - y));
    return near && Math.hypot(near.x - x, near.y - y) < 36 ? near : null;
  }

  const kinds = { bars: inColumns(bars), stack: inColumns(stack), dots, spans, lines, heat };

  /** [{svg, hits, name, rest, columns}]: one drawing, or one per panel. */
  function draw(chart, points, room) {
    const whole = axis => axis && { scale: "linear", ...axis }; // what is absent has its default
    const complete = { ...chart, x: whole(chart.x), y: whole(chart.y) };
    return points.length ? [kinds[chart.kind](complete, points, room)].flat() : [];
  }

  return { draw, find };
})();
