"use strict";
// Draws the page from the block of JSON in it. Whatever came from the store is set as text, never as markup.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  // The run with the most to show comes first.
  const largest = data.runs.reduce((best, run, index) => (run.entries.length > data.runs[best].entries.length ? index : best), 0);
  const state = { run: largest, seq: null, sort: "seq", down: true, filter: "", metric: "" };

  // Elements

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "class") element.className = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
    return element;
  }
  function draw(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
    return element;
  }
  function fill(element, ...children) {
    element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  }

  // Words

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  function size(nbytes) {
    if (nbytes === null || nbytes === undefined) return "–";
    let amount = nbytes, unit = 0;
    while (amount >= 999.5 && unit < UNITS.length - 1) { amount /= 1024; unit += 1; }
    return unit === 0 ? nbytes + " B" : amount.toFixed(amount < 9.995 ? 2 : amount < 99.95 ? 1 : 0) + " " + UNITS[unit];
  }
  const ratio = (large, small) => (small > 0 ? (large / small).toFixed(large < 9.995 * small ? 2 : large < 99.5 * small ? 1 : 0) + "×" : "–");
  const number = (value) => (typeof value === "number" ? String(Number(value.toPrecision(5))) : value);
  const time = (ms) => (ms === undefined ? "–" : new Date(ms).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" }));
  function moment(ms) {
    if (ms === undefined) return "–";
    const at = new Date(ms), two = (value) => String(value).padStart(2, "0");
    return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
  }
  const grouped = (value) => value.toLocaleString("en").replaceAll(",", " ");
  const plural = (count, word) => grouped(count) + " " + word + (count === 1 ? "" : "s");
  const chip = (text, kind) => make("span", { class: "chip " + kind }, text);

  // What is shown

  const run = () => data.runs[state.run] || { name: "", entries: [] };
  const entries = () => run().entries;
  const chosen = () => entries().find((entry) => entry.seq === state.seq);
  const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] || 0), 0);
  const steps = (entry) => grouped(entry.step) + (entry.points ? " +" + grouped(entry.points.count) : "");
  const metrics = () => [...new Set(entries().flatMap((entry) => Object.keys(entry.metrics || {})))].sort();
  function verdict(entry) {
    const plan = data.gc && data.gc.runs[run().name];
    return (plan && plan.verdicts[String(entry.seq)]) || null;
  }
  const goes = (entry) => { const found = verdict(entry); return found !== null && !found[0]; };

  function showTiles() {
    const all = data.runs.flatMap((each) => each.entries);
    const plain = sum(all, "state"), disk = sum(data.tiers, "nbytes");
    const newest = entries().find((entry) => !entry.is_archival && !entry.damage);
    const tile = (value, words, kind) => make("div", { class: "tile " + (kind || "") }, make("b", {}, value), make("span", {}, words));
    const found = [
      tile(ratio(plain, disk), "smaller than " + size(plain) + " of plain checkpoints", "lead"),
      tile(size(disk), "in packs, all runs"),
      ...(data.journals || []).map((each) => tile(size(each.nbytes), "in journals, all runs")),
      tile(grouped(all.length), plural(data.runs.length, "run").replace(/^/, "checkpoints in ")),
      newest ? tile("step " + steps(newest), "newest of " + run().name + ", " + time(newest.time_ms)) : null,
    ];
    if (data.gc) {
      const soon = data.gc.freed, later = data.gc.moved + data.gc.rewritten + data.gc.waiting;
      found.push(tile(size(soon + later), data.gc.dropped ? "a collection would free, deleting " + data.gc.dropped : "a collection would free"));
    }
    fill(byId("tiles"), found);
    const broken = all.filter((entry) => entry.damage), partial = all.filter((entry) => entry.lost_count);
    fill(byId("alerts"),
      broken.length ? make("p", { class: "notice" }, plural(broken.length, "checkpoint") + " cannot be read; ckstore repair says what can be done.") : null,
      partial.length ? make("p", { class: "notice" }, plural(partial.length, "checkpoint") + " lost some tensors; the others can be restored.") : null);
  }

  function showRuns() {
    if (data.runs.length < 2) return;
    fill(byId("runs"), data.runs.map((each, index) =>
      make("button", { type: "button", "aria-pressed": String(index === state.run), onclick: () => { state.run = index; state.seq = null; showAll(); } }, each.name)));
  }

  // The chart: lanes above each other, one column a commit

  const TOP = 8, GAP = 26;
  function lanes() {
    const found = [
      { name: "state", height: 92, parts: [["raw_new", "raw"], ["raw_reused", "reused"]], unit: size },
      { name: "stored", height: 92, parts: [["stored_whole", "whole"], ["stored_delta", "delta"]], unit: size },
      { name: "depth", height: 40, parts: [["depth", "depth"]], unit: String },
    ];
    if (state.metric) found.push({ name: state.metric, height: 72, curve: true, unit: number });
    found.push({ name: "kept", height: 16, marks: true });
    let y = TOP;
    for (const lane of found) { lane.y = y; y += lane.height + GAP; }
    return found;
  }

  function showChart() {
    const rows = [...entries()].reverse(), found = lanes(), plot = byId("plot");
    const height = found[found.length - 1].y + found[found.length - 1].height + 22;
    const room = Math.max(320, plot.clientWidth - 2);
    const step = Math.max(7, Math.min(64, room / Math.max(1, rows.length)));
    const width = Math.max(room, rows.length * step);
    const svg = draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": plural(rows.length, "commit") });
    const axis = draw("svg", { width: 78, height, "aria-hidden": "true" });
    for (const lane of found) drawLane(lane, rows, step, width, svg, axis);
    const every = Math.max(1, Math.ceil(74 / step));
    rows.forEach((entry, index) => {
      const x = index * step;
      if ((rows.length - 1 - index) % every === 0) {
        // At either end the number would be cut off.
        const words = grouped(entry.step), half = words.length * 3.2, middle = x + step / 2;
        const [at, anchor] = middle + half > width ? [width, "end"] : middle < half ? [0, "start"] : [middle, "middle"];
        svg.append(draw("text", { x: at, y: height - 6, "text-anchor": anchor }, words));
      }
      const words = `step ${entry.step}, seq ${entry.seq}: ` + (entry.damage ? "damaged" : `${size(entry.state)} of state, ${size(entry.written)} written`);
      svg.append(draw("rect", { x, y: 0, width: step, height: height - 20, class: "hit", "data-seq": entry.seq, onclick: () => choose(entry.seq) }, draw("title", {}, words)));
      if (entry.seq === state.seq) svg.append(draw("rect", { x: x + .5, y: .5, width: step - 1, height: height - 21, rx: 3, class: "chosen", id: "chosen" }));
    });
    axis.append(draw("text", { x: 66, y: height - 6, "text-anchor": "end" }, "step"));
    const left = plot.scrollLeft, wasDrawn = plot.firstChild !== null;
    fill(plot, svg);
    fill(byId("axis"), axis);
    plot.scrollLeft = wasDrawn ? left : width;
    const mark = byId("chosen");
    if (mark) {
      const x = Number(mark.getAttribute("x"));
      if (x < plot.scrollLeft || x + step > plot.scrollLeft + plot.clientWidth) plot.scrollLeft = x - plot.clientWidth / 2;
    }
    showLegend();
  }

  function drawLane(lane, rows, step, width, svg, axis) {
    const bottom = lane.y + lane.height, gap = step > 12 ? 2 : 1;
    axis.append(draw("text", { x: 66, y: lane.y + 10, "text-anchor": "end", class: "name" }, lane.name.length > 11 ? lane.name.slice(0, 10) + "…" : lane.name));
    svg.append(draw("line", { x1: 0, x2: width, y1: bottom + .5, y2: bottom + .5, class: "grid" }));
    if (lane.marks) { drawMarks(lane, rows, step, svg); return; }
    const value = (entry) => (lane.curve ? entry.metrics && entry.metrics[lane.name] : lane.parts.reduce((total, [name]) => total + (entry[name] || 0), 0));
    const values = rows.map(value).filter((each) => typeof each === "number");
    const high = Math.max(...values, lane.curve ? -Infinity : 1), low = lane.curve ? Math.min(...values) : 0;
    if (!values.length) return;
    axis.append(draw("text", { x: 66, y: lane.y + 24, "text-anchor": "end" }, lane.unit(high)));
    if (lane.curve) axis.append(draw("text", { x: 66, y: bottom, "text-anchor": "end" }, lane.unit(low)));
    const y = (each) => bottom - (high === low ? .5 : (each - low) / (high - low)) * lane.height;
    if (lane.curve) {
      const points = rows.map((entry, index) => [index * step + step / 2, value(entry)]).filter(([, each]) => typeof each === "number");
      svg.append(draw("polyline", { class: "curve", points: points.map(([x, each]) => x + "," + y(each)).join(" ") }));
      for (const [x, each] of points) if (step >= 9) svg.append(draw("circle", { class: "point", cx: x, cy: y(each), r: 3 }));
      return;
    }
    rows.forEach((entry, index) => {
      let base = bottom;
      for (const [name, kind] of lane.parts) {
        const part = (entry[name] || 0) / high * lane.height;
        if (part <= 0) continue;
        svg.append(draw("rect", { class: kind, x: index * step + gap / 2, width: step - gap, y: base - Math.max(part, .75), height: Math.max(part, .75) }));
        base -= part;
      }
    });
  }

  function drawMarks(lane, rows, step, svg) {
    const middle = lane.y + lane.height / 2, r = Math.min(5, step / 2 - .5);
    rows.forEach((entry, index) => {
      const x = index * step + step / 2;
      if (entry.damage || entry.lost_count) svg.append(draw("path", { class: "bad", d: `M${x - r},${middle - r} h${2 * r} v${2 * r} h${-2 * r} z` }));
      else if (goes(entry)) svg.append(draw("path", { class: "go", d: `M${x - r},${middle - r} h${2 * r} l${-r},${2 * r} z` }));
      else svg.append(draw("circle", { class: "keep", cx: x, cy: middle, r }));
      if (entry.tags && entry.tags.length) svg.append(draw("path", { class: "flag", d: `M${x - 3},${lane.y - 12} h7 v8 l-3.5,-3 l-3.5,3 z` }));
    });
  }

  function showLegend() {
    const box = (kind) => draw("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, draw("rect", { width: 12, height: 12, rx: 3, class: kind }));
    const shape = (kind, d) => draw("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, draw("path", { class: kind, d }));
    const items = [
      [box("raw"), "state: bytes not stored before"], [box("reused"), "state: bytes reused"],
      [box("whole"), "stored whole"], [box("delta"), "stored as a difference"], [box("depth"), "longest chain of bases"],
      [shape("keep", "M6 1a5 5 0 1 0 .01 0z"), "kept"], [shape("go", "M1 1h10l-5 10z"), "a collection would delete it"],
      [shape("bad", "M1 1h10v10h-10z"), "damaged, or partial"], [shape("flag", "M2 0h8v12l-4-4l-4 4z"), "tagged"],
    ];
    if (state.metric) items.push([box("point"), state.metric]);
    fill(byId("legend"), items.map(([mark, words]) => make("li", {}, mark, words)));
  }

  function move(event) {
    const rows = [...entries()].reverse(), at = rows.findIndex((entry) => entry.seq === state.seq);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: rows.length - 1, PageUp: at - 10, PageDown: at + 10 }[event.key];
    if (to === undefined || !rows.length) return;
    event.preventDefault();
    choose(rows[Math.max(0, Math.min(rows.length - 1, to))].seq);
  }

  // One checkpoint

  function showSelected() {
    const entry = chosen(), facts = [];
    if (!entry) { fill(byId("selected"), make("p", { class: "empty" }, "Nothing was committed to this run.")); fill(byId("groups")); return; }
    const fact = (name, ...words) => facts.push(make("dt", {}, name), make("dd", {}, ...words));
    fact("step", grouped(entry.step) + " (seq " + entry.seq + (entry.generation ? ", generation " + entry.generation : "") + ")");
    if (entry.damage) fact("damage", chip("damaged", "bad"), entry.damage);
    if (entry.id) {
      fact("committed", time(entry.time_ms) + (entry.parent === null ? "" : ", after seq " + entry.parent));
      if (entry.points) fact("points", plural(entry.points.count, "point") + " of the journal, steps " + grouped(entry.points.first) + " to " + grouped(entry.points.last) + ", " + size(entry.points.nbytes));
      if (entry.tags.length) fact("tags", entry.tags.map((tag) => chip(tag, "tag")));
      const named = Object.entries(entry.metrics);
      if (named.length) fact("metrics", named.map(([name, value]) => chip(name + " = " + number(value), "")));
      fact("state", size(entry.state) + " in " + plural(entry.tensors, "tensor") + (entry.raw_reused ? ", " + size(entry.raw_reused) + " of it stored before" : ""));
      fact("written", size(entry.written) + " (" + ratio(entry.state, entry.written) + " smaller)");
      if (entry.read !== undefined) fact("a restore reads", size(entry.read) + ", bases included");
      if (entry.depths) fact("chunks by depth", entry.depths.map((count, depth) => depth + ": " + grouped(count)).join(" · "));
      if (entry.tiers) fact("lies in", Object.entries(entry.tiers).map(([tier, nbytes]) => tier + " " + size(nbytes)).join(", ") || "–");
      fact("fidelity", entry.fidelity + (entry.is_archival ? ", archival" : ""));
      if (entry.lost_count) fact("lost tensors", chip(String(entry.lost_count), "bad"), entry.lost.join(", ") + (entry.lost_count > entry.lost.length ? ", …" : ""));
      if (entry.reason) fact("why so", entry.reason);
      fact("id", entry.id + "…");
    }
    const found = verdict(entry);
    if (found) fact(found[0] ? "kept" : "would go", chip(found[0] ? "kept" : "would go", found[0] ? "keep" : "go"), found[1].join("; "));
    fill(byId("selected"), make("dl", {}, facts));
    showGroups(entry);
  }

  function showGroups(entry) {
    const rows = [...(entry.groups || [])].sort((one, other) => other[2] - one[2]);
    if (!rows.length) { fill(byId("groups"), make("p", { class: "empty" }, "It holds no tensor.")); return; }
    const high = Math.max(...rows.map((row) => row[2]), 1);
    const bar = (plain, stored) => draw("svg", { viewBox: "0 0 100 18", preserveAspectRatio: "none", "aria-hidden": "true" },
      draw("rect", { class: "reused", y: 1, height: 16, width: plain / high * 100 }), draw("rect", { class: "whole", y: 4, height: 10, width: Math.min(stored, high) / high * 100 }));
    const head = make("tr", {}, ["group", "", "plain", "stored", ""].map((word, index) => make("td", { class: "hint" + (index > 1 ? " num" : "") }, word)));
    fill(byId("groups"), make("table", { class: "bars" }, make("tbody", {}, head, rows.map(([key, count, plain, stored]) =>
      make("tr", {}, make("td", {}, key || "(the state itself)", make("span", { class: "hint" }, " " + plural(count, "tensor"))), make("td", { class: "bar" }, bar(plain, stored)),
        make("td", { class: "num" }, size(plain)), make("td", { class: "num" }, size(stored)), make("td", { class: "num" }, ratio(plain, stored)))))));
  }

  // The store

  function showGc() {
    if (!data.gc) { fill(byId("gc"), make("p", { class: "empty" }, data.gc_problem || "Not known.")); return; }
    const gc = data.gc, plan = gc.runs[run().name] || { blocked: "", notes: [], verdicts: {} }, facts = [];
    const fact = (name, ...words) => facts.push(make("dt", {}, name), make("dd", {}, ...words));
    fact("policy", gc.rules || "none is stored: a collection deletes nothing, and collects garbage only");
    const kept = Object.values(plan.verdicts).filter((each) => each[0]).length;
    fact("this run", plural(kept, "checkpoint") + " kept, " + grouped(Object.keys(plan.verdicts).length - kept) + " would go");
    fact("store: freed at once", size(gc.freed));
    fact("store: to the trash", size(gc.moved + gc.rewritten) + (gc.free_ms ? ", freed from " + time(gc.free_ms) : ""));
    if (gc.waiting) fact("store: in the trash", size(gc.waiting));
    if (gc.young) fact("store: too young", size(gc.young));
    fill(byId("gc"), make("dl", {}, facts),
      [gc.stop, plan.blocked].filter((text) => text).map((text) => make("p", { class: "notice" }, text)),
      plan.notes.map((text) => make("p", { class: "note" }, text)));
  }

  function showTiers() {
    if (!data.tiers.length) { fill(byId("tiers"), make("p", { class: "empty" }, "There is no pack yet.")); return; }
    const high = Math.max(...data.tiers.map((tier) => tier.nbytes), 1);
    const bar = (tier) => draw("svg", { viewBox: "0 0 100 18", preserveAspectRatio: "none", "aria-hidden": "true" },
      draw("rect", { class: "reused", y: 1, height: 16, width: tier.nbytes / high * 100 }), draw("rect", { class: "delta", y: 4, height: 10, width: Math.min(tier.needed, tier.nbytes) / high * 100 }));
    const head = make("tr", {}, ["tier", "", "packs", "bytes", "needed"].map((word, index) => make("td", { class: "hint" + (index > 1 ? " num" : "") }, word)));
    fill(byId("tiers"), make("table", { class: "bars" }, make("tbody", {}, head, data.tiers.map((tier) =>
      make("tr", {}, make("td", {}, tier.name), make("td", { class: "bar" }, bar(tier)), make("td", { class: "num" }, grouped(tier.packs)),
        make("td", { class: "num" }, size(tier.nbytes)), make("td", { class: "num" }, size(tier.needed)))))));
  }

  // The table

  const COLUMNS = [
    ["step", "step", true], ["seq", "seq", true], ["time_ms", "committed", false], ["state", "state", true], ["written", "written", true],
    ["ratio", "ratio", true], ["depth", "depth", true], ["names", "tags and metrics", false], ["why", "kept, and why", false],
  ];
  function sortValue(entry, key) {
    if (key === "ratio") return entry.written ? entry.state / entry.written : -1;
    if (key === "names") return names(entry).join(" ");
    if (key === "why") return why(entry);
    return entry[key] === undefined ? -1 : entry[key];
  }
  const names = (entry) => [...(entry.tags || []), ...Object.entries(entry.metrics || {}).map(([name, value]) => name + "=" + number(value))];
  function why(entry) {
    const found = verdict(entry), words = [];
    if (entry.damage) words.push("damaged: " + entry.damage);
    if (entry.lost_count) words.push(plural(entry.lost_count, "tensor") + " lost");
    if (found) words.push((found[0] ? "" : "would go: ") + found[1].join("; "));
    return words.join("; ");
  }

  function showTable() {
    fill(byId("table").tHead, make("tr", {}, COLUMNS.map(([key, words, isNumber]) =>
      make("th", { class: isNumber ? "num" : "", scope: "col", "aria-sort": state.sort === key ? (state.down ? "descending" : "ascending") : null },
        make("button", { type: "button", "data-sort": key, onclick: () => { state.down = state.sort === key ? !state.down : true; state.sort = key; showTable(); focusSort(key); } },
          words + (state.sort === key ? (state.down ? " ▾" : " ▴") : ""))))));
    const wanted = state.filter.toLowerCase();
    const rows = entries().filter((entry) => !wanted || [entry.step, entry.seq, entry.fidelity, ...names(entry), why(entry)].join(" ").toLowerCase().includes(wanted));
    rows.sort((one, other) => {
      const [a, b] = [sortValue(one, state.sort), sortValue(other, state.sort)];
      return (a < b ? -1 : a > b ? 1 : one.seq - other.seq) * (state.down ? -1 : 1);
    });
    fill(byId("table").tBodies[0], rows.map((entry) =>
      make("tr", { "aria-current": entry.seq === state.seq ? "true" : null, "data-seq": entry.seq, onclick: () => choose(entry.seq) },
        make("td", { class: "num" }, make("button", { type: "button", class: "row", "aria-label": "Select step " + entry.step + ", seq " + entry.seq }, steps(entry))),
        make("td", { class: "num" }, String(entry.seq)), make("td", { class: "when" }, moment(entry.time_ms)), make("td", { class: "num" }, size(entry.state)),
        make("td", { class: "num" }, size(entry.written)), make("td", { class: "num" }, entry.state === undefined ? "–" : ratio(entry.state, entry.written)),
        make("td", { class: "num" }, entry.depth === undefined ? "–" : String(entry.depth)),
        make("td", { class: "names" }, (entry.tags || []).map((tag) => chip(tag, "tag")), Object.entries(entry.metrics || {}).map(([name, value]) => chip(name + " " + number(value), ""))),
        make("td", { class: "why" }, entry.damage || entry.lost_count ? chip(entry.damage ? "damaged" : "partial", "bad") : goes(entry) ? chip("would go", "go") : null, why(entry).replace(/^would go: /, "")))));
    byId("shown").textContent = rows.length === entries().length ? plural(rows.length, "checkpoint") : rows.length + " of " + plural(entries().length, "checkpoint");
  }
  function focusSort(key) {
    const button = document.querySelector(`[data-sort="${key}"]`);
    if (button) button.focus();
  }

  // Together

  function choose(seq) {
    state.seq = seq;
    showChart();
    showSelected();
    for (const row of byId("table").tBodies[0].rows) {
      if (Number(row.dataset.seq) === seq) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
  }

  function showAll() {
    if (!chosen() && entries().length) state.seq = entries()[0].seq;
    const found = metrics();
    if (!found.includes(state.metric)) state.metric = found.find((name) => name.includes("loss")) || found[0] || "";
    fill(byId("metric"), (found.length ? found : [""]).map((name) => {
      const option = make("option", { value: name }, name || "no metric");
      option.selected = name === state.metric;
      return option;
    }));
    byId("plot").replaceChildren();
    showRuns(); showTiles(); showChart(); showSelected(); showGc(); showTiers(); showTable();
  }

  const THEMES = ["system", "light", "dark"];
  byId("theme").addEventListener("click", (event) => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || "system") + 1) % THEMES.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    event.currentTarget.textContent = "Theme: " + next;
  });
  byId("plot").addEventListener("keydown", move);
  byId("metric").addEventListener("change", (event) => { state.metric = event.target.value; showChart(); });
  byId("filter").addEventListener("input", (event) => { state.filter = event.target.value; showTable(); });
  let waiting = 0;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(showChart, 80); });
  byId("place").textContent = data.store;
  byId("made").textContent = "Made " + time(data.made_ms) + " from the manifests of " + data.store + "; no tensor was read.";
  document.title = "ckstore report: " + data.store;
  showAll();
})();
