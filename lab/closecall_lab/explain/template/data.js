"use strict";
/* Reads the packed data back (the codes are those of codes.py) and answers questions about it. */
const D = JSON.parse(document.getElementById("data").textContent);
const MEAN = -1; // in the place of a head: the mean of the layer's heads; in the place of a layer: of all of them

async function inflate(text) {
  const raw = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
const words16 = (bytes) => new Uint16Array(bytes.buffer, bytes.byteOffset, bytes.byteLength / 2);

const share = (code) => (code === 65535 ? NaN : code / 65534);
const place = (code) => {
  if (code === 0) return NaN; // not ranked
  const u = (code - 128) / 127;
  return Math.sign(u) * u * u;
};
const mass = (code) => (code === 0 ? 0 : Math.pow(D.floor, (255 - code) / 254));
const table = (read) => Float32Array.from({ length: 256 }, (_, code) => read(code));
const PLACES = table(place), MASSES = table(mass), SHARES = table((code) => code / 255);

/* Cells of a map lie tile after tile; `first[t]` is where tile t begins. */
function layout(seen) {
  const first = [0];
  for (const n of seen) first.push(first[first.length - 1] + n);
  return { seen, first, tiles: seen.length, cells: first[first.length - 1], blocks: Math.max(...seen) };
}
const FINE = layout(D.visible);
const COARSE = layout(
  Array.from({ length: Math.ceil(D.tiles / D.pool) }, (_, t) =>
    Math.ceil(D.visible[Math.min(D.tiles, (t + 1) * D.pool) - 1] / D.pool)),
);

const forced = (p, t, b) => b < D.policies[p].sinks || b >= D.first_own[t];

/* Facts of tiles and blocks, by policy: `fact(p, "lost", l, h, t)`. */
const FACTS = [];
async function openFacts() {
  for (const policy of D.policies) {
    const bytes = {};
    for (const name in policy.facts) bytes[name] = await inflate(policy.facts[name]);
    const found = { triggered: bytes.triggered };
    for (const name in bytes) if (name !== "triggered") found[name] = words16(bytes[name]);
    found.bits = [];
    for (const layer of policy.layers) found.bits.push(layer.kept ? await inflate(layer.kept) : null);
    FACTS.push(found);
  }
}
const ofTile = (p, name, l, h, t) => FACTS[p][name][(l * D.heads + h) * D.tiles + t];
const ofBlock = (p, name, l, h, b) => FACTS[p][name][(l * D.heads + h) * D.blocks + b];
const fact = (p, name, l, h, t) => share(ofTile(p, name, l, h, t));

/* Whether a tile keeps a block; null where the page does not have the exact map. */
const rowBytes = Math.ceil(FINE.cells / 8);
function keeps(p, l, h, t, b) {
  if (b >= D.visible[t]) return false;
  const bits = FACTS[p].bits[l];
  if (!bits) return null;
  const cell = FINE.first[t] + b;
  return ((bits[h * rowBytes + (cell >> 3)] >> (cell & 7)) & 1) === 1;
}

/* Means over everything or over a layer's heads, where MEAN stands for them. */
function pairs(l, h) {
  if (l === MEAN) return D.layers.flatMap((_, i) => Array.from({ length: D.heads }, (_, j) => [i, j]));
  return h === MEAN ? Array.from({ length: D.heads }, (_, j) => [l, j]) : [[l, h]];
}
function meanOf(values) {
  let sum = 0, n = 0;
  for (const v of values) if (!Number.isNaN(v)) { sum += v; n++; }
  return n ? sum / n : NaN;
}
const tileMean = (p, name, l, h, t) => meanOf(pairs(l, h).map(([i, j]) => fact(p, name, i, j, t)));
const keptShare = (p, l, h, t) => meanOf(pairs(l, h).map(([i, j]) => ofTile(p, "counts", i, j, t) / D.visible[t]));

/* How many tiles may choose a block: those that see it and are not forced to keep it. */
function choosers(p, b) {
  let n = 0;
  for (let t = 0; t < D.tiles; t++) if (b < D.visible[t] && !forced(p, t, b)) n++;
  return n;
}

/* The maps. A field is `{ layout, pool, values }`; values are NaN where nothing was ranked. */
const unpacked = new Map(); // packed arrays, the last few
async function unpack(key, text) {
  let found = unpacked.get(key);
  if (!found) {
    found = text ? inflate(text) : Promise.resolve(null);
    unpacked.set(key, found);
    if (unpacked.size > 40) unpacked.delete(unpacked.keys().next().value);
  }
  return found;
}

function fromBits(p, l, h) {
  const values = new Float32Array(FINE.cells), bits = FACTS[p].bits[l], at = h * rowBytes;
  for (let i = 0; i < FINE.cells; i++) values[i] = (bits[at + (i >> 3)] >> (i & 7)) & 1;
  return values;
}

const STORED = { score: "scores", mass: "masses", lost: "lost", kept: "kept" };
const TABLES = { score: PLACES, mass: MASSES, lost: MASSES, kept: SHARES };

function decoded(bytes, view, cells, h) {
  const values = new Float32Array(cells), read = TABLES[view];
  for (let i = 0; i < cells; i++) values[i] = read[bytes[h * cells + i]];
  return values;
}

/* The field of one head. */
async function headField(p, l, h, view) {
  const layer = D.policies[p].layers[l];
  if (view === "kept" && layer.kept) return { layout: FINE, pool: 1, values: fromBits(p, l, h) };
  if (layer.detail === 2 && view !== "kept") {
    const bytes = await unpack([p, l, STORED[view === "lost" ? "mass" : view]].join(), view === "score" ? layer.scores : layer.masses);
    if (!bytes || !bytes.length) return null;
    const values = decoded(bytes, view === "lost" ? "mass" : view, FINE.cells, h);
    if (view === "lost") {
      const kept = fromBits(p, l, h);
      for (let i = 0; i < values.length; i++) if (kept[i]) values[i] = 0;
    }
    return { layout: FINE, pool: 1, values };
  }
  const text = layer.coarse && layer.coarse[STORED[view]];
  const bytes = text && await unpack([p, l, "coarse", view].join(), text);
  return bytes ? { layout: COARSE, pool: D.pool, values: decoded(bytes, view, COARSE.cells, h) } : null;
}

async function field(p, l, h, view) {
  if (l === MEAN) {
    const text = D.policies[p].mean[STORED[view]];
    const bytes = text && await unpack([p, "mean", view].join(), text);
    return bytes ? { layout: FINE, pool: 1, values: decoded(bytes, view, FINE.cells, 0) } : null;
  }
  if (h !== MEAN) return headField(p, l, h, view);
  let total = null;
  for (let j = 0; j < D.heads; j++) {
    const found = await headField(p, l, j, view);
    if (!found) return null;
    if (!total) total = found;
    else for (let i = 0; i < found.values.length; i++) total.values[i] += found.values[i];
  }
  for (let i = 0; i < total.values.length; i++) total.values[i] /= D.heads;
  return total;
}

/* The value of a cell; undefined where the tile does not see the block. */
function valueAt(found, t, b) {
  if (b >= D.visible[t]) return undefined;
  const u = Math.floor(t / found.pool), c = Math.floor(b / found.pool);
  return found.values[found.layout.first[u] + c];
}

/* Policies by what they are called before their options, where that tells them apart. */
const presets = D.policies.map((p) => p.label.split(":")[0]);
const SHORT = new Set(presets).size < presets.length ? D.policies.map((p) => p.label) : presets;

/* Text. */
const blockText = (b) => D.text.slice(D.block_starts[b], D.block_starts[b + 1]);
const tileText = (t) => D.text.slice(D.tile_starts[t], D.tile_starts[t + 1]);
const snippet = (text, most) => {
  const line = text.replace(/\s+/g, " ").trim();
  const letters = Array.from(line);
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : line;
};
const percent = (x) => {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const v = 100 * x;
  if (v === 0) return "0%";
  if (v < 0.01) return "<0.01%";
  return (v >= 9.95 ? v.toFixed(0) : v >= 0.995 ? v.toFixed(1) : v.toPrecision(2)) + "%";
};
const digits = (x) => {
  if (Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  if (Math.abs(x) < 1e-4) return x > 0 ? "<0.0001" : ">-0.0001";
  return Math.abs(x) >= 0.0995 ? x.toFixed(2) : x.toPrecision(2);
};
