/* What is looked at. It lives in the address, so that a link shows the same. */
const VIEWS = D.truth ? ["kept", "score", "mass", "lost"] : ["kept", "score"];
const GRIDS = D.truth ? ["lost", "margin", "kept"] : ["margin", "kept"];
const WHOLE = { x: 0, y: 0, span: 1 }; // the part of the map that is seen, in shares of its side

const DEFAULT = {
  layer: D.layers[D.layers.length - 1], head: 0, tile: D.tiles - 1,
  block: D.answer_blocks.length ? D.answer_blocks[0] : 0,
  view: "kept", grid: GRIDS[0], sort: "close", of: 0, theme: "",
};
const state = { ...DEFAULT, zoom: { ...WHOLE } };
const listeners = [];

const among = (list, value, fallback) => (list.includes(value) ? value : fallback);
function number(text, low, high, fallback) {
  const n = Number(text);
  return text !== "" && Number.isInteger(n) && n >= low && n <= high ? n : fallback;
}

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const get = (name) => given.get(name) || "";
  const layer = get("layer") === "mean" ? "mean" : among(D.layers, Number(get("layer") || DEFAULT.layer), DEFAULT.layer);
  const part = get("zoom").split(",").map(Number);
  const fits = part.length === 3 && part.every(Number.isFinite) && part[2] > 0 && part[2] <= 1;
  Object.assign(state, {
    layer,
    head: layer === "mean" || get("head") === "mean" ? "mean" : number(get("head"), 0, D.heads - 1, DEFAULT.head),
    tile: number(get("tile"), 0, D.tiles - 1, DEFAULT.tile),
    block: number(get("block"), 0, D.blocks - 1, DEFAULT.block),
    view: among(VIEWS, get("view"), DEFAULT.view),
    grid: among(GRIDS, get("grid"), DEFAULT.grid),
    sort: among(["close", "cost", "answer"], get("sort"), DEFAULT.sort),
    of: number(get("of"), 0, D.policies.length - 1, DEFAULT.of),
    theme: among(["light", "dark"], get("theme"), DEFAULT.theme),
    zoom: fits ? inside({ x: part[0], y: part[1], span: part[2] }) : { ...WHOLE },
  });
}

function inside(part) {
  const span = Math.min(1, Math.max(4 / Math.max(D.tiles, D.blocks, 4), part.span));
  const clip = (v) => Math.min(1 - span, Math.max(0, v));
  return { x: clip(part.x), y: clip(part.y), span };
}

function address() {
  const told = new URLSearchParams({ layer: state.layer, head: state.head, tile: state.tile });
  for (const name of ["block", "view", "grid", "sort", "of", "theme"])
    if (state[name] !== DEFAULT[name]) told.set(name, state[name]);
  if (state.zoom.span < 1) told.set("zoom", [state.zoom.x, state.zoom.y, state.zoom.span].map((v) => v.toFixed(4)).join());
  return "#" + told.toString().replaceAll("%2C", ",");
}

function go(change) {
  Object.assign(state, change);
  if (state.layer === "mean") state.head = "mean";
  try { history.replaceState(null, "", address()); } catch { /* inside a notebook's frame there is no address */ }
  for (const tell of listeners) tell(change);
}

const layerAt = () => (state.layer === "mean" ? MEAN : D.layers.indexOf(state.layer));
const headAt = () => (state.head === "mean" ? MEAN : state.head);
const where = () =>
  state.layer === "mean" ? "mean of all layers and heads"
    : `layer ${state.layer}, ${state.head === "mean" ? "mean of its heads" : "head " + state.head}`;
