/* The panels around the map: strip, text, grid of layers and heads, tile, block, close calls. */
const $ = (id) => document.getElementById(id);
const plain = (text) => document.createTextNode(text);

/* Text with the answer marked in it; never HTML. */
function marked(from, to) {
  const found = [];
  let at = from;
  for (const [start, end] of [...D.answers].sort((a, b) => a[0] - b[0])) {
    const low = Math.max(at, start), high = Math.min(to, end);
    if (low >= high) continue;
    found.push(plain(D.text.slice(at, low)), make("mark", {}, D.text.slice(low, high)));
    at = high;
  }
  found.push(plain(D.text.slice(at, to)));
  return found;
}
const around = (from, to) => make("span", { class: "around" }, D.text.slice(from, to));

/* -- the strip: blocks that are read, tiles that read ------------------------------------------------------------- */
const LANE = 30, GAP = 6, LABEL = 48;
let lanes, lanesField = [];

function makeStrip() {
  lanes = make("canvas", { tabIndex: 0 });
  lanes.setAttribute("role", "img");
  lanes.setAttribute("aria-label", "the prompt as a strip of blocks, and of tiles");
  $("lanes").append(lanes);
  const at = (event) => {
    const box = lanes.getBoundingClientRect(), x = (event.clientX - box.left - LABEL) / (box.width - LABEL);
    const lane = Math.floor((event.clientY - box.top) / (LANE + GAP));
    if (x < 0 || x >= 1) return {};
    return lane < D.policies.length ? { block: Math.floor(x * D.blocks), lane } : { tile: Math.floor(x * D.tiles) };
  };
  lanes.addEventListener("click", (event) => {
    const { block, tile } = at(event);
    if (block !== undefined) go({ block });
    else if (tile !== undefined) go({ tile });
  });
  lanes.addEventListener("pointermove", (event) => {
    const { block, tile, lane } = at(event);
    if (block !== undefined) {
      const value = lanesField[lane] && valueAt(lanesField[lane], state.tile, block);
      const words = block < D.visible[state.tile] ? cellWords(lane, layerAt(), headAt(), state.tile, block, value) : `behind tile ${state.tile}`;
      showTip(event, `block ${block}: ${words}\n“${snippet(blockText(block), 160)}”`);
    } else if (tile !== undefined) {
      const lost = D.policies.map((p, i) => `${p.label}: ` + (D.truth ? `lost ${percent(tileMean(i, "lost", layerAt(), headAt(), tile))}` : `kept ${percent(keptShare(i, layerAt(), headAt(), tile))}`));
      showTip(event, `tile ${tile}\n${lost.join("\n")}\n“${snippet(tileText(tile), 160)}”`);
    } else showTip(event, "");
  });
  lanes.addEventListener("pointerleave", (event) => showTip(event, ""));
}

async function loadStrip() {
  const view = state.view, l = layerAt(), h = headAt();
  const fields = [];
  for (let p = 0; p < D.policies.length; p++) fields.push(await field(p, l, h, view));
  if (l !== layerAt() || h !== headAt() || view !== state.view) return;
  lanesField = fields;
  drawStrip();
}

function drawStrip() {
  const l = layerAt(), h = headAt(), n = D.policies.length;
  sized(lanes, (n + 1) * (LANE + GAP) + 10, (ctx, width) => {
    const wide = width - LABEL, x = (i, of) => LABEL + (i / of) * wide;
    const thick = (of) => Math.max(0.6, wide / of - (wide / of > 4 ? 1 : 0));
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    for (let p = 0; p < n; p++) {
      const top = p * (LANE + GAP), found = lanesField[p];
      ctx.fillStyle = n > 1 ? named[p ? "second" : "first"] : named.quiet;
      ctx.fillText(n > 1 ? snippet(SHORT[p], 8) : "blocks", 0, top + LANE / 2);
      for (let b = 0; b < D.blocks; b++) {
        const value = found ? valueAt(found, state.tile, b) : undefined;
        const isForced = D.policies[p].dense === "" && found && found.pool === 1 && forced(p, state.tile, b);
        ctx.fillStyle = value === undefined ? named.page : css(tone(state.view, value, isForced, h !== MEAN && (state.view !== "kept" || found.pool === 1)));
        ctx.fillRect(x(b, D.blocks), top, thick(D.blocks), LANE);
      }
    }
    const top = n * (LANE + GAP);
    ctx.fillStyle = named.quiet;
    ctx.fillText("tiles", 0, top + LANE / 2);
    for (let t = 0; t < D.tiles; t++) {
      const v = byTile(0, l, h, D.truth ? "lost" : "kept")[t];
      ctx.fillStyle = css(along(D.truth ? "lost" : "kept", D.truth ? massTone(v) : v));
      ctx.fillRect(x(t, D.tiles), top, thick(D.tiles), LANE);
    }
    ctx.strokeStyle = named.mark;
    ctx.lineWidth = 2;
    ctx.strokeRect(x(state.tile, D.tiles) - 1, top, wide / D.tiles + 1, LANE);
    ctx.strokeRect(x(state.block, D.blocks) - 1, 1, wide / D.blocks + 1, n * (LANE + GAP) - GAP - 2);
    ctx.fillStyle = named.mark;
    for (const b of D.answer_blocks) {
      const at = x(b + 0.5, D.blocks), y = n * (LANE + GAP) - GAP;
      ctx.beginPath();
      ctx.moveTo(at, y); ctx.lineTo(at - 4, y + 6); ctx.lineTo(at + 4, y + 6);
      ctx.fill();
    }
  });
  $("strip-says").textContent = `blocks: what tile ${state.tile} made of them in ${where()} · tiles: ${D.truth ? "the mass each lost" : "the share each kept"}${n > 1 ? ` (${D.policies[0].label})` : ""}`;
  const exact = h !== MEAN;
  const tiles = D.truth ? massKeys("lost", "tiles: lost") : [[ramps.kept, "tiles: kept nothing", "all"]];
  legend("strip-legend", [...mapKeys(state.view, exact), ...(state.view === "lost" ? [] : tiles), ...(D.answer_blocks.length ? [["mark", "holds the answer"]] : [])]);
}

function drawReading() {
  const b = state.block, near = 200, from = D.block_starts[b], to = D.block_starts[b + 1];
  const before = Math.max(0, from - near), after = Math.min(D.text.length, to + near);
  const words = make("b", {}, ...marked(from, to)), pane = $("reading");
  pane.replaceChildren(around(before, from), words, around(to, after));
  pane.scrollTop = words.offsetTop - pane.offsetTop - 28; // long lines before it must not hide it
}

/* -- the grid of layers and heads --------------------------------------------------------------------------------- */
function heat(cells, roomy) {
  const head = make("tr", {}, make("th"), ...Array.from({ length: D.heads }, (_, h) => make("th", {}, D.heads <= 16 || h % 4 === 0 ? String(h) : "")));
  const body = D.layers.map((layer, l) =>
    make("tr", {}, make("th", {}, String(layer)), ...Array.from({ length: D.heads }, (_, h) => {
      const { colour, title, text = "" } = cells(l, h);
      const cell = make("td", { title }, text);
      cell.dataset.layer = layer;
      cell.dataset.head = h;
      if (colour) { cell.style.background = css(colour); cell.style.color = ink(colour); }
      if (state.layer === layer && (state.head === h || state.head === "mean")) cell.setAttribute("aria-selected", "true");
      return cell;
    })));
  const table = make("table", { class: roomy ? "heat roomy" : "heat" }, make("thead", {}, head), make("tbody", {}, ...body));
  table.style.maxWidth = 40 + Math.max(120, D.heads * (roomy ? 56 : 44)) + "px";
  table.addEventListener("click", (event) => {
    const cell = event.target.closest("td");
    if (cell) go({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) });
  });
  return table;
}

/* The mean over the tiles of one head, remembered: it does not change. */
const means = new Map();
function headMean(p, name, l, h) {
  const key = [p, name, l, h].join();
  if (!means.has(key)) {
    const of = (t) => (name === "kept" ? ofTile(p, "counts", l, h, t) : fact(p, name, l, h, t));
    const values = Array.from({ length: D.tiles }, (_, t) => of(t));
    const seen = D.visible.reduce((a, b) => a + b, 0);
    means.set(key, name === "kept" ? values.reduce((a, b) => a + b, 0) / seen : meanOf(values));
  }
  return means.get(key);
}
const GRID = {
  lost: { name: "lost", says: "lost", tone: (v) => along("lost", massTone(v)), keys: () => massKeys("lost", "lost mass") },
  margin: { name: "cut_margin", says: "margin", tone: (v) => (Number.isNaN(v) ? solid.dropped : along("kept", Math.sqrt(v))), keys: () => [[ramps.kept, "margin 0: closest cuts", "1"]] },
  kept: { name: "kept", says: "kept", tone: (v) => along("kept", v), keys: () => [[ramps.kept, "kept no block", "every block"]] },
};
function drawGrid() {
  const kind = GRID[state.grid];
  $("grids").replaceChildren(...D.policies.map((policy, p) => {
    const table = heat((l, h) => {
      const v = headMean(p, kind.name, l, h);
      const shown = state.grid === "margin" ? digits(v) : percent(v);
      return { colour: kind.tone(v), title: `layer ${D.layers[l]}, head ${h}: ${kind.says} ${shown}` };
    }, D.layers.length <= 12);
    return make("div", { class: `policy-${p}` }, ...(D.policies.length > 1 ? [make("h3", {}, policy.label)] : []), table);
  }));
  legend("grid-legend", kind.keys());
}

/* -- one tile: what it read, ranked -------------------------------------------------------------------------------- */
let unfolded = false; // whether tiles show all of their blocks
const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/* The scores on the tile's own scale: all of them, and enlarged around the cut. The margin is a distance. */
function axis(rows, margin) {
  const W = 560, pad = 12, close = Math.min(0.6, Math.max(0.06, 5 * margin));
  const low = Math.max(-1, Math.min(-0.05, ...rows.map((r) => r.place)));
  const lines = [[44, low, 1, "all blocks"], [134, -close, margin + close, "around the cut"]];
  const drawn = lines.flatMap(([y, from, to, name]) => {
    const x = (v) => pad + ((v - from) / (to - from)) * (W - 2 * pad);
    const nodes = [svg("line", { x1: pad, x2: W - pad, y1: y, y2: y, class: "line" })];
    nodes.push(svg("text", { x: pad, y: y - 28 }, name));
    for (const row of rows) {
      if (row.place < from || row.place > to) continue;
      const r = 3 + 9 * Math.sqrt(Number.isNaN(row.mass) ? 0 : row.mass);
      const dot = svg("circle", { cx: x(row.place).toFixed(1), cy: y, r: r.toFixed(1), class: row.kept ? "in" : "out" });
      dot.append(svg("title", {}, plain(`block ${row.block}: ${row.kept ? "kept" : "dropped"}, place ${digits(row.place)}${D.truth ? `, true mass ${percent(row.mass)}` : ""}`)));
      nodes.push(dot);
    }
    const cut = x(margin / 2);
    nodes.push(svg("line", { x1: cut, x2: cut, y1: y - 22, y2: y + 22, class: "cutline" }));
    nodes.push(svg("line", { x1: x(0), x2: x(margin), y1: y + 19, y2: y + 19, class: "margin" }));
    for (const end of [0, margin]) nodes.push(svg("line", { x1: x(end), x2: x(end), y1: y + 15, y2: y + 23, class: "margin" }));
    const anchor = cut > W * 0.8 ? "end" : cut < W * 0.35 ? "start" : "middle";
    nodes.push(svg("text", { x: cut, y: y - 28, class: "name", "text-anchor": anchor }, `margin ${digits(margin)}`));
    nodes.push(svg("text", { x: pad, y: y + 31 }, digits(from)), svg("text", { x: W - pad, y: y + 31, "text-anchor": "end" }, digits(to)));
    return nodes;
  });
  return svg("svg", { viewBox: `0 0 ${W} 172`, class: "axis", role: "img", "aria-label": `scores of the tile's blocks; margin ${digits(margin)}` }, ...drawn);
}

function ladderRow(row, near) {
  const dot = make("span", { class: "dot " + row.fate });
  const tr = make("tr", { class: near ? "near" : "" },
    make("td", { class: "number" }, dot, String(row.block)),
    make("td", { class: "words", dir: "auto" }, snippet(blockText(row.block), 120)),
    make("td", { class: "place" }, row.fate === "forced" ? "forced" : digits(row.place)),
    ...(D.truth ? [make("td", { class: "mass" }, percent(row.mass))] : []));
  tr.dataset.block = row.block;
  tr.dataset.fate = row.fate;
  return tr;
}
const skipRow = (text) => make("tr", { class: "skip" }, make("td", { colSpan: 4 }, text));

async function ladder(p) {
  const l = layerAt(), h = headAt(), t = state.tile, policy = D.policies[p];
  const panel = make("div", { class: `policy-${p}` }, ...(D.policies.length > 1 ? [make("h3", {}, policy.label)] : []));
  if (h === MEAN) return meanLadder(panel, p, l, t);
  const scores = await field(p, l, h, "score"), masses = D.truth ? await field(p, l, h, "mass") : null;
  const count = ofTile(p, "counts", l, h, t), seen = D.visible[t], margin = fact(p, "cut_margin", l, h, t);
  const facts = [`kept ${count} of ${seen} blocks`];
  if (!Number.isNaN(margin)) facts.push(`margin ${digits(margin)}`);
  if (D.truth) facts.push(`lost ${percent(fact(p, "lost", l, h, t))} of its mass, ${percent(fact(p, "lost_most", l, h, t))} in its worst row`);
  if (t === D.tiles - 1 && count < seen) facts.push(`proven: no row lost more than ${percent(policy.layers[l].bound[h])}`);
  panel.append(make("p", { class: "quiet facts" }, facts.join(" · ")));
  if (ofTile(p, "triggered", l, h, t)) {
    const own = fact(p, "margin", l, h, t);
    const why = Number.isNaN(own) || Math.abs(own - margin) < 1e-4 ? "" : `: its first cut had a margin of ${digits(own)}`;
    panel.append(make("p", { class: "quiet triggered" }, `This tile was given more blocks than others${why}.`));
  }
  if (!FACTS[p].bits[l] || (scores && scores.pool > 1)) {
    panel.append(make("p", { class: "quiet" }, "The scores of this layer are not on this page in full (see the remark at the top): there is no ranking to show."));
    return panel;
  }
  const rows = Array.from({ length: seen }, (_, b) => {
    const kept = keeps(p, l, h, t, b), isForced = policy.dense === "" && forced(p, t, b);
    return { block: b, kept, fate: isForced ? "forced" : kept ? "kept" : "dropped",
      place: scores ? valueAt(scores, t, b) : NaN, mass: masses && masses.pool === 1 ? valueAt(masses, t, b) : NaN };
  });
  const fixed = rows.filter((r) => r.fate === "forced" || Number.isNaN(r.place));
  const ranked = rows.filter((r) => !fixed.includes(r)).sort((a, b) => b.kept - a.kept || b.place - a.place || a.block - b.block);
  const cut = ranked.filter((r) => r.kept).length, dropped = ranked.length - cut;
  if (ranked.length && dropped) panel.append(axis(ranked, margin));
  const near = (i) => dropped > 0 && Math.abs(i + 0.5 - cut) < 3;
  const shows = (i) => unfolded || i < 2 || Math.abs(i + 0.5 - cut) < 5 || ranked.length < 14;
  const body = [];
  fixed.slice(0, unfolded ? fixed.length : 3).forEach((row) => body.push(ladderRow(row, false)));
  if (fixed.length > 3 && !unfolded) body.push(skipRow(`${fixed.length - 3} more kept without ranking`));
  let skipped = 0;
  ranked.forEach((row, i) => {
    if (i === cut && dropped) {
      body.push(make("tr", { class: "cut" }, make("td", { colSpan: 4 }, `the cut: above, barely kept; below, barely dropped by ${digits(margin)}`)));
    }
    if (!shows(i)) { skipped++; return; }
    if (skipped) body.push(skipRow(`${skipped} more`));
    skipped = 0;
    body.push(ladderRow(row, near(i)));
  });
  if (skipped) body.push(skipRow(`${skipped} more, dropped`));
  const head = make("tr", {}, ...["block", "text", "place", ...(D.truth ? ["true mass"] : [])].map((x) => make("th", {}, x)));
  head.children[0].className = "number"; head.children[2].className = "place";
  if (D.truth) head.children[3].className = "mass";
  const table = make("table", { class: "ladder" }, make("thead", {}, head), make("tbody", {}, ...body));
  const keys = make("div", { class: "legend" });
  keys.append(...[["", "kept"], ["dropped", "dropped"], ["forced", "forced"]].map(([kind, name]) => make("span", { class: "key" }, make("span", { class: "dot " + kind }), name)),
    make("span", { class: "key" }, D.truth ? "larger dots: more true mass" : ""));
  panel.append(keys, table);
  if (ranked.length >= 14 || fixed.length > 3) {
    panel.append(make("button", { type: "button", class: "unfold", onclick: () => { unfolded = !unfolded; drawTile(); } }, unfolded ? "show fewer" : `show all ${seen}`));
  }
  return panel;
}

async function meanLadder(panel, p, l, t) {
  const kept = await field(p, l, MEAN, "kept"), masses = D.truth ? await field(p, l, MEAN, "mass") : null;
  panel.append(make("p", { class: "quiet facts" }, `Over the heads: kept ${percent(keptShare(p, l, MEAN, t))} of its blocks` + (D.truth ? `, lost ${percent(tileMean(p, "lost", l, MEAN, t))} of its mass` : "") + ". Choose a head to see its ranking and its cut."));
  const rows = Array.from({ length: D.visible[t] }, (_, b) => ({ block: b, share: valueAt(kept, t, b), mass: masses && masses.pool === 1 ? valueAt(masses, t, b) : NaN }));
  rows.sort((a, b) => b.share - a.share || (b.mass || 0) - (a.mass || 0) || a.block - b.block);
  const head = make("tr", {}, ...["block", "text", "kept by", ...(D.truth ? ["true mass"] : [])].map((x) => make("th", {}, x)));
  head.children[0].className = "number"; head.children[2].className = "place";
  const body = rows.slice(0, unfolded ? rows.length : 12).map((r) => {
    const tr = make("tr", {}, make("td", { class: "number" }, String(r.block)), make("td", { class: "words", dir: "auto" }, snippet(blockText(r.block), 120)),
      make("td", { class: "place" }, percent(r.share)), ...(D.truth ? [make("td", { class: "mass" }, percent(r.mass))] : []));
    tr.dataset.block = r.block;
    return tr;
  });
  panel.append(make("table", { class: "ladder" }, make("thead", {}, head), make("tbody", {}, ...body)));
  return panel;
}

let tileTurn = 0;
async function drawTile() {
  const turn = ++tileTurn, t = state.tile;
  const panels = [];
  for (let p = 0; p < D.policies.length; p++) panels.push(await ladder(p));
  if (turn !== tileTurn) return;
  $("tile-number").textContent = t;
  $("tile-says").textContent = `in ${where()}${D.asking.includes(t) ? " · it asks the question" : ""} · its own words:`;
  $("tile-text").replaceChildren(...marked(D.tile_starts[t], D.tile_starts[t + 1]));
  $("ladders").replaceChildren(...panels);
}

/* -- one block: its words, who keeps it, who drops it --------------------------------------------------------------- */
function spell(list) {
  const byLayer = new Map();
  for (const [l, h] of list) byLayer.set(l, [...(byLayer.get(l) || []), h]);
  return [...byLayer].map(([l, hs]) => `layer ${D.layers[l]}: ${hs.length === D.heads ? "all heads" : (hs.length > 1 ? "heads " : "head ") + hs.join(", ")}`).join("; ");
}
function drawBlock() {
  const b = state.block, t = state.tile;
  $("block-number").textContent = b;
  const holds = D.answer_blocks.includes(b) ? " · it holds the answer" : "";
  $("block-says").textContent = `tokens ${b * D.block} to ${Math.min(D.tokens, (b + 1) * D.block) - 1}${holds}`;
  $("block-text").replaceChildren(...marked(D.block_starts[b], D.block_starts[b + 1]));
  $("keepers").replaceChildren(...D.policies.map((policy, p) => {
    const of = choosers(p, b), panel = make("div", { class: `policy-${p}` });
    if (D.policies.length > 1) panel.append(make("h3", {}, policy.label));
    const all = pairs(MEAN, MEAN), sees = b < D.visible[t];
    const kept = all.filter(([l, h]) => keeps(p, l, h, t, b) === true), dropped = all.filter(([l, h]) => keeps(p, l, h, t, b) === false);
    const lines = [];
    if (of) lines.push(`Kept by ${percent(meanOf(all.map(([l, h]) => ofBlock(p, "keepers", l, h, b) / of)))} of the ${of} tiles that may choose it, over all heads.`);
    else lines.push("Every tile that sees it is forced to keep it.");
    if (!sees) lines.push(`Tile ${t} comes before it.`);
    else {
      lines.push(`Tile ${t}: kept by ${kept.length} of ${kept.length + dropped.length} heads.`);
      const few = kept.length <= dropped.length; // the shorter list says as much
      if (kept.length && dropped.length) lines.push(few ? `Kept only at ${spell(kept)}.` : `Dropped only at ${spell(dropped)}.`);
    }
    for (const text of lines) panel.append(make("p", { class: "quiet who" }, text));
    const table = heat((l, h) => {
      const v = of ? ofBlock(p, "keepers", l, h, b) / of : 1, here = sees ? keeps(p, l, h, t, b) : null;
      return { colour: along("kept", v), text: here === null ? "" : here ? "●" : "○",
        title: `layer ${D.layers[l]}, head ${h}: ${percent(v)} of the tiles keep it` + (here === null ? "" : `; tile ${t} ${here ? "keeps" : "drops"} it`) };
    }, D.layers.length <= 12);
    const keys = make("div", { class: "legend" });
    legend(keys, [[ramps.kept, "kept by no tile", "by all"]]);
    keys.append(make("span", { class: "key" }, `● tile ${t} keeps it ○ drops it`));
    panel.append(table, keys);
    return panel;
  }));
}

/* -- close calls ---------------------------------------------------------------------------------------------------- */
const CALLS = 15; // shown at first, and more by the button
let callsShown = CALLS;
function drawCalls() {
  const policy = D.policies[state.of], onAnswer = (c) => D.asking.includes(c[4]) && D.answer_blocks.includes(c[5]);
  let list = policy.calls.slice();
  if (state.sort === "cost") list.sort((a, b) => (b[1] || 0) - (a[1] || 0));
  if (state.sort === "answer") list = list.filter(onAnswer);
  $("calls-says").textContent = `blocks that ${policy.label} dropped within ${D.close} of the cut` + (D.truth ? "; the true mass says whether it mattered" : "");
  const titles = [["layer"], ["head"], ["tile"], ["block"], ["missed by"], ...(D.truth ? [["would have got", "mass"]] : []), ["text that was left out", "words"]];
  const head = make("tr", {}, ...titles.map(([name, kind]) => make("th", { class: kind || "" }, name)));
  const most = Math.max(1e-9, ...policy.calls.map((c) => c[1] || 0));
  const body = list.slice(0, callsShown).map((call) => {
    const [missed, held, layer, h, t, b] = call;
    const bar = make("span", { class: "bar" });
    bar.style.width = Math.round((70 * (held || 0)) / most) + "px";
    const tr = make("tr", {}, ...[layer, h, t, b].map((x) => make("td", {}, String(x))),
      make("td", {}, digits(missed)), ...(D.truth ? [make("td", { class: "mass" }, percent(held), bar)] : []),
      make("td", { class: "words", dir: "auto" }, snippet(blockText(b), 110)));
    if (onAnswer(call)) tr.children[3].append(make("span", { class: "dot dropped", title: "holds the answer" }));
    tr.addEventListener("click", () => { go({ layer, head: h, tile: t, block: b }); $("tile-panel").scrollIntoView({ behavior: "smooth" }); });
    return tr;
  });
  if (!body.length) {
    const none = policy.dense ? "Nothing was dropped: there is nothing to call close." : state.sort === "answer" ? "No close call touched the answer." : "No block came that close to the cut.";
    body.push(make("tr", {}, make("td", { class: "words", colSpan: titles.length }, none)));
  }
  $("calls-table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  const left = list.length - callsShown;
  $("more").hidden = left <= 0;
  $("more").textContent = `show ${Math.min(CALLS, left)} more of ${list.length}`;
}
