/* The map of tiles by blocks: one canvas for each policy, and one for their difference. All show the same part. */
const GUTTER = { left: 34, top: 18, right: 46, bottom: 40 };
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name in node && name !== "title") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};

const tip = document.getElementById("tip");
function showTip(event, text) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const room = 16, wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = Math.max(4, Math.min(innerWidth - wide - 4, event.clientX + room)) + "px";
  const below = event.clientY + room;
  tip.style.top = (below + high > innerHeight ? event.clientY - high - room : below) + "px";
}

/* A canvas as sharp as the screen is; `draw(ctx, width, height)` in CSS pixels. */
function sized(canvas, height, draw) {
  const width = canvas.clientWidth, dots = window.devicePixelRatio || 1;
  if (!width) return;
  canvas.style.height = height + "px";
  canvas.width = Math.round(width * dots);
  canvas.height = Math.round(height * dots);
  const ctx = canvas.getContext("2d");
  ctx.setTransform(dots, 0, 0, dots, 0, 0);
  ctx.clearRect(0, 0, width, height);
  draw(ctx, width, height);
}

/* Means by tile and by block that stand beside the map. Those by tile are remembered: of all heads they take a while. */
const rowMeans = new Map();
function byTile(p, l, h, view) {
  const key = [p, l, h, view].join();
  if (!rowMeans.has(key)) rowMeans.set(key, tileMeans(p, l, h, view));
  return rowMeans.get(key);
}
function tileMeans(p, l, h, view) {
  const read = {
    kept: (t) => keptShare(p, l, h, t),
    score: (t) => tileMean(p, "cut_margin", l, h, t),
    mass: (t) => 1 - tileMean(p, "lost", l, h, t),
    lost: (t) => tileMean(p, "lost", l, h, t),
  }[view];
  return Float32Array.from({ length: D.tiles }, (_, t) => read(t));
}
function byBlock(p, l, h, view, found) {
  const of = Array.from({ length: D.blocks }, (_, b) => choosers(p, b));
  const keepers = (b) => (of[b] ? meanOf(pairs(l, h).map(([i, j]) => ofBlock(p, "keepers", i, j, b) / of[b])) : NaN);
  const held = (b) => meanOf(pairs(l, h).map(([i, j]) => share(ofBlock(p, "block_mass", i, j, b))));
  if (view === "mass") return Float32Array.from({ length: D.blocks }, (_, b) => held(b));
  if (view !== "lost") return Float32Array.from({ length: D.blocks }, (_, b) => keepers(b));
  const sums = new Float32Array(D.blocks), seen = new Float32Array(D.blocks);
  for (let t = 0; t < D.tiles; t++)
    for (let b = 0; b < D.visible[t]; b++) { sums[b] += valueAt(found, t, b); seen[b]++; }
  return sums.map((v, b) => v / seen[b]);
}
const MARGINALS = {
  kept: ["share of its blocks each tile kept", "share of tiles that kept each block"],
  score: ["margin of each tile's cut", "share of tiles that kept each block"],
  mass: ["mass each tile kept", "mass of each block"],
  lost: ["mass each tile lost", "mass lost with each block"],
};

class MapView {
  constructor(which) {
    this.which = which; // a policy's number, or "difference"
    this.canvas = make("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    const name = which === "difference" ? "difference" : D.policies[which].label;
    this.title = make("h3", {}, name);
    this.keys = make("div", { class: "legend" });
    this.figure = make("figure", { class: `policy-${which}` }, ...(D.policies.length > 1 ? [this.title] : []), this.canvas);
    if (which === "difference") this.figure.append(this.keys);
    this.canvas.setAttribute("aria-label", `${name}: tiles by blocks`);
    this.pointers = new Map();
    this.listen();
  }

  /* Reads the cells of what is looked at, and paints one pixel for each into a picture that `draw` enlarges. */
  async load() {
    const l = layerAt(), h = headAt(), view = state.view, exact = h !== MEAN;
    const of = this.which === "difference" ? [0, 1] : [this.which];
    const fields = [];
    for (const p of of) fields.push(await field(p, l, h, view));
    if (l !== layerAt() || h !== headAt() || view !== state.view) return; // something newer is on its way
    this.fields = fields.every(Boolean) ? fields : null;
    this.picture = null;
    if (this.fields) {
      this.paint(view, exact && (view !== "kept" || fields[0].pool === 1));
      const marginals = of.map((p, i) => [byTile(p, l, h, view), byBlock(p, l, h, view, fields[i])]);
      const [a, b] = marginals;
      this.marginals = b ? a.map((values, i) => values.map((v, j) => v - b[i][j])) : a;
    }
    this.draw();
  }

  paint(view, exact) {
    const [a, b] = this.fields, { layout, pool } = a;
    const picture = document.createElement("canvas");
    picture.width = layout.blocks;
    picture.height = layout.tiles;
    const ctx = picture.getContext("2d"), image = ctx.createImageData(layout.blocks, layout.tiles);
    const p = this.which === "difference" ? 0 : this.which;
    for (let t = 0; t < layout.tiles; t++)
      for (let c = 0; c < layout.seen[t]; c++) {
        const at = layout.first[t] + c, x = a.values[at];
        const isForced = pool === 1 && D.policies[p].dense === "" && forced(p, t, c);
        const colour = b ? differenceTone(view, x, b.values[at], exact) : tone(view, x, isForced, exact);
        image.data.set([colour[0], colour[1], colour[2], 255], 4 * (t * layout.blocks + c));
      }
    ctx.putImageData(image, 0, 0);
    this.picture = picture;
    this.pool = pool;
  }

  draw() {
    const width = this.canvas.clientWidth, side = Math.max(120, width - GUTTER.left - GUTTER.right);
    this.canvas.style.touchAction = state.zoom.span < 1 ? "none" : "pan-y";
    sized(this.canvas, GUTTER.top + side + GUTTER.bottom, (ctx) => {
      this.side = side;
      ctx.font = "11px system-ui, sans-serif";
      ctx.fillStyle = named.quiet;
      if (!this.picture) {
        ctx.textAlign = "center";
        ctx.fillText("nothing was ranked here", GUTTER.left + side / 2, GUTTER.top + side / 2);
        return;
      }
      this.drawCells(ctx, side);
      this.drawAxes(ctx, side);
      this.drawMarginals(ctx, side);
      this.drawMarks(ctx, side);
    });
  }

  /* Places: `px` of a block, `py` of a tile. */
  px(block) { return GUTTER.left + ((block / D.blocks - state.zoom.x) / state.zoom.span) * this.side; }
  py(tile) { return GUTTER.top + ((tile / D.tiles - state.zoom.y) / state.zoom.span) * this.side; }

  drawCells(ctx, side) {
    const { x, y, span } = state.zoom, wide = D.blocks / this.pool, high = D.tiles / this.pool;
    const dots = window.devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER.left, GUTTER.top, side, side);
    ctx.clip();
    ctx.imageSmoothingEnabled = (side * dots) / span < Math.max(wide, high); // many cells to a dot: their mean
    ctx.imageSmoothingQuality = "high";
    ctx.drawImage(this.picture, x * wide, y * high, span * wide, span * high, GUTTER.left, GUTTER.top, side, side);
    const cell = side / (span * D.blocks);
    if (cell >= 9) {
      ctx.strokeStyle = named.page;
      ctx.lineWidth = 1;
      ctx.beginPath();
      for (let b = Math.floor(x * D.blocks); b <= (x + span) * D.blocks; b++) { ctx.moveTo(this.px(b), GUTTER.top); ctx.lineTo(this.px(b), GUTTER.top + side); }
      for (let t = Math.floor(y * D.tiles); t <= (y + span) * D.tiles; t++) { ctx.moveTo(GUTTER.left, this.py(t)); ctx.lineTo(GUTTER.left + side, this.py(t)); }
      ctx.stroke();
    }
    ctx.restore();
    ctx.strokeStyle = named.line;
    ctx.strokeRect(GUTTER.left + 0.5, GUTTER.top + 0.5, side - 1, side - 1);
  }

  drawAxes(ctx, side) {
    const steps = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
    const step = steps.find((s) => (s / (D.blocks * state.zoom.span)) * side > 34) || 1024;
    ctx.fillStyle = named.quiet;
    ctx.textAlign = "center";
    ctx.textBaseline = "alphabetic";
    for (let b = 0; b < D.blocks; b += step) {
      const at = this.px(b + 0.5);
      if (at >= GUTTER.left + 6 && at <= GUTTER.left + side - 64) ctx.fillText(b, at, GUTTER.top - 5);
    }
    ctx.textAlign = "right";
    ctx.fillText("block →", GUTTER.left + side - 10, GUTTER.top - 5);
    ctx.textBaseline = "middle";
    for (let t = 0; t < D.tiles; t += step) {
      const at = this.py(t + 0.5);
      if (at >= GUTTER.top + 6 && at <= GUTTER.top + side - 20) ctx.fillText(t, GUTTER.left - 5, at);
    }
    ctx.fillText("tile ↓", GUTTER.left - 3, GUTTER.top + side - 7);
  }

  drawMarginals(ctx, side) {
    const [rows, columns] = this.marginals, sided = this.which === "difference";
    const top = (values) => values.reduce((m, v) => (Number.isNaN(v) ? m : Math.max(m, Math.abs(v))), 0) || 1;
    const rowTop = top(rows), columnTop = top(columns);
    const plain = state.view === "lost" ? named.second : named.kept;
    const paint = (v) => (sided ? (v >= 0 ? named.first : named.second) : plain);
    const right = GUTTER.left + side + 4, room = GUTTER.right - 8, base = GUTTER.top + side + 4, deep = GUTTER.bottom - 8;
    const bar = (low, high) => [Math.max(low, 0), Math.max(0.5, high - low - (high - low > 4 ? 1 : 0))];
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER.left, GUTTER.top, side + GUTTER.right, side + GUTTER.bottom);
    ctx.clip();
    rows.forEach((v, t) => {
      const [y, thick] = bar(this.py(t), this.py(t + 1));
      if (Number.isNaN(v) || y < GUTTER.top - thick || y > GUTTER.top + side) return;
      ctx.fillStyle = paint(v);
      ctx.fillRect(right, Math.max(y, GUTTER.top), (Math.abs(v) / rowTop) * room, Math.min(thick, GUTTER.top + side - y));
    });
    columns.forEach((v, b) => {
      const [x, thick] = bar(this.px(b), this.px(b + 1));
      if (Number.isNaN(v) || x < GUTTER.left - thick || x > GUTTER.left + side) return;
      ctx.fillStyle = paint(v);
      ctx.fillRect(Math.max(x, GUTTER.left), base, Math.min(thick, GUTTER.left + side - x), (Math.abs(v) / columnTop) * (deep - 8));
    });
    ctx.restore();
    ctx.fillStyle = named.quiet;
    ctx.textBaseline = "alphabetic";
    ctx.textAlign = "right";
    ctx.fillText("≤" + percent(rowTop), right + room + 3, GUTTER.top - 5);
    ctx.textAlign = "left";
    ctx.fillText("≤" + percent(columnTop), right, base + 10);
  }

  drawMarks(ctx, side) {
    const inX = (v) => v >= GUTTER.left - 1 && v <= GUTTER.left + side + 1;
    const inY = (v) => v >= GUTTER.top - 1 && v <= GUTTER.top + side + 1;
    ctx.strokeStyle = named.mark;
    ctx.lineWidth = 1;
    const row = [this.py(state.tile), this.py(state.tile + 1)], column = [this.px(state.block), this.px(state.block + 1)];
    ctx.beginPath();
    for (const y of row) if (inY(y)) { ctx.moveTo(GUTTER.left, y); ctx.lineTo(GUTTER.left + side, y); }
    for (const x of column) if (inX(x)) { ctx.moveTo(x, GUTTER.top); ctx.lineTo(x, GUTTER.top + side); }
    ctx.stroke();
    ctx.fillStyle = named.mark;
    for (const b of D.answer_blocks) {
      const x = this.px(b + 0.5), y = GUTTER.top + side + 3;
      if (!inX(x)) continue;
      ctx.beginPath();
      ctx.moveTo(x, y); ctx.lineTo(x - 4, y + 7); ctx.lineTo(x + 4, y + 7);
      ctx.fill();
    }
    for (const t of D.asking) {
      const y = this.py(t + 0.5), x = GUTTER.left + side + 3;
      if (!inY(y)) continue;
      ctx.beginPath();
      ctx.moveTo(x, y); ctx.lineTo(x + 7, y - 4); ctx.lineTo(x + 7, y + 4);
      ctx.fill();
    }
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const u = (event.clientX - box.left - GUTTER.left) / this.side, v = (event.clientY - box.top - GUTTER.top) / this.side;
    const { x, y, span } = state.zoom;
    const beside = u >= 0 && u < 1 && v >= 0 && v < 1;
    return { u, v, beside, block: Math.floor((x + u * span) * D.blocks), tile: Math.floor((y + v * span) * D.tiles) };
  }

  says({ tile, block, beside }) {
    if (!beside || !this.fields) return "";
    if (block >= D.visible[tile]) return `tile ${tile} comes before block ${block}`;
    const lines = [`tile ${tile} reading block ${block}`];
    const of = this.which === "difference" ? [0, 1] : [this.which];
    of.forEach((p, i) => {
      const name = of.length > 1 ? D.policies[p].label + ": " : "";
      lines.push(name + cellWords(p, layerAt(), headAt(), tile, block, valueAt(this.fields[i], tile, block)));
    });
    return lines.join("\n") + "\n“" + snippet(blockText(block), 90) + "”";
  }

  zoom(by, u = 0.5, v = 0.5) {
    const { x, y, span } = state.zoom, wider = inside({ x, y, span: span * by }).span;
    go({ zoom: inside({ x: x + u * (span - wider), y: y + v * (span - wider), span: wider }) });
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointerdown", (event) => {
      this.pointers.set(event.pointerId, event);
      this.moved = false;
      this.from = { x: event.clientX, y: event.clientY, zoom: { ...state.zoom } };
      try { canvas.setPointerCapture(event.pointerId); } catch { /* a made-up event has no pointer to capture */ }
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.pointers.has(event.pointerId)) return showTip(event, this.says(this.cellAt(event)));
      const others = [...this.pointers.values()].filter((e) => e.pointerId !== event.pointerId);
      if (others.length) {
        const before = this.pointers.get(event.pointerId), apart = (e) => Math.hypot(e.clientX - others[0].clientX, e.clientY - others[0].clientY);
        this.moved = true;
        if (apart(event) > 8) this.zoom(apart(before) / apart(event));
        this.pointers.set(event.pointerId, event);
        return undefined;
      }
      const dx = event.clientX - this.from.x, dy = event.clientY - this.from.y;
      if (Math.hypot(dx, dy) < 4 && !this.moved) return undefined;
      this.moved = true;
      showTip(event, "");
      const { x, y, span } = this.from.zoom;
      if (span < 1) go({ zoom: inside({ x: x - (dx / this.side) * span, y: y - (dy / this.side) * span, span }) });
      return undefined;
    });
    const release = (event) => {
      const here = this.pointers.delete(event.pointerId);
      if (!here || this.moved || event.type === "pointercancel") return;
      const { tile, block, beside } = this.cellAt(event);
      if (beside) go({ tile, block });
    };
    canvas.addEventListener("pointerup", release);
    canvas.addEventListener("pointercancel", release);
    canvas.addEventListener("pointerleave", (event) => showTip(event, ""));
    canvas.addEventListener("dblclick", (event) => {
      const { u, v, beside } = this.cellAt(event);
      if (beside) this.zoom(0.5, u, v);
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const { u, v } = this.cellAt(event);
      this.zoom(Math.exp(event.deltaY * 0.004), u, v);
    }, { passive: false });
  }
}

/* What became of a block in a tile, in words. `value` is what the map shows there. */
function cellWords(p, l, h, t, b, value) {
  if (h === MEAN) {
    if (state.view === "kept") return `kept by ${percent(value)} of the heads`;
    return state.view === "score" ? `mean place ${digits(value)}` : `${state.view === "mass" ? "true" : "lost"} mass ${percent(value)}`;
  }
  const kept = keeps(p, l, h, t, b);
  const fate = forced(p, t, b) ? "forced" : kept === null ? "" : kept ? "kept" : "dropped";
  if (state.view === "kept" || value === undefined) return fate;
  if (state.view === "score") return fate + (Number.isNaN(value) ? "" : `, place ${digits(value)}`);
  return `${fate}, ${state.view === "mass" ? "true" : "lost"} mass ${percent(value)}`;
}
