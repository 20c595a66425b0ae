/* Puts everything together: what is drawn when, controls and keys. */
const maps = [...D.policies.keys(), ...(D.policies.length > 1 ? ["difference"] : [])].map((which) => new MapView(which));

function fill(id, options) {
  $(id).replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  $(id).addEventListener("change", () => go({ [id]: $(id).value === "mean" ? "mean" : Number($(id).value) }));
}
const upTo = (n) => Array.from({ length: n }, (_, i) => [String(i), String(i)]);

function step(name, by) {
  const options = [...$(name).options].filter((o) => !o.disabled).map((o) => o.value);
  const next = options[(options.indexOf($(name).value) + by + options.length) % options.length];
  go({ [name]: next === "mean" ? "mean" : Number(next) });
}

function showControls() {
  $("layer").value = state.layer;
  $("head").disabled = state.layer === "mean";
  $("head").value = state.head;
  $("tile").value = state.tile;
  $("block").value = state.block;
  for (const group of document.querySelectorAll("[data-choice]"))
    for (const button of group.children)
      button.setAttribute("aria-checked", String(String(state[group.dataset.choice]) === button.dataset.value));
}

function showMapWords() {
  const exact = headAt() !== MEAN, [rows, columns] = MARGINALS[state.view];
  $("map-says").textContent = `${where()} · bars: ${rows} (right), ${columns} (below)`;
  legend("map-legend", [...mapKeys(state.view, exact), ...(D.answer_blocks.length ? [["mark", "the answer; the tile that asks"]] : [["mark", "the tile that asks"]])]);
  for (const map of maps) if (map.which === "difference") legend(map.keys, differenceKeys(state.view, exact));
  const l = layerAt(), detail = l === MEAN ? 2 : D.policies[0].layers[l].detail;
  const coarse = state.view === "kept" ? detail < 1 : detail < 2;
  $("map-note").textContent = coarse ? `This layer's map is stored in cells of ${D.pool} x ${D.pool}, to keep the page small.` : "";
}

/* Only what a change touches is drawn again. */
function redraw(change) {
  const touches = (...names) => !change || names.some((name) => name in change);
  if (touches("theme")) setTheme();
  showControls();
  if (touches("layer", "head", "view", "theme")) {
    showMapWords();
    for (const map of maps) map.load();
    loadStrip();
  } else if (touches("tile", "block", "zoom")) {
    for (const map of maps) map.draw();
    if (touches("tile", "block")) drawStrip();
  }
  if (touches("block", "theme")) drawReading();
  if (touches("layer", "head", "grid", "theme")) drawGrid();
  if (touches("layer", "head", "tile", "theme")) drawTile();
  if (touches("block", "tile", "layer", "head", "theme")) drawBlock();
  if (touches("sort", "of", "theme")) drawCalls();
}

const KEYS = {
  ArrowLeft: () => step("head", -1), ArrowRight: () => step("head", 1),
  ArrowUp: () => step("layer", -1), ArrowDown: () => step("layer", 1),
  j: () => step("tile", 1), k: () => step("tile", -1), "[": () => step("block", -1), "]": () => step("block", 1),
  m: () => go({ head: state.head === "mean" ? 0 : "mean", layer: state.layer === "mean" ? DEFAULT.layer : state.layer }),
  0: () => go({ zoom: { ...WHOLE } }), "?": () => toggleHelp(),
};
VIEWS.forEach((view, i) => { KEYS[i + 1] = () => go({ view }); });
function toggleHelp() {
  $("how").open = !$("how").open;
  if ($("how").open) $("how").scrollIntoView({ block: "nearest" });
}

function wire() {
  $("canvases").append(...maps.map((map) => map.figure));
  fill("layer", [...D.layers.map((l) => [String(l), String(l)]), ["mean", "mean of all"]]);
  fill("head", [...upTo(D.heads), ["mean", "mean"]]);
  fill("tile", upTo(D.tiles));
  fill("block", upTo(D.blocks));
  makeStrip();
  const known = { view: VIEWS, grid: GRIDS };
  for (const group of document.querySelectorAll("[data-choice]"))
    for (const button of group.children) {
      const name = group.dataset.choice, value = button.dataset.value;
      if (known[name] && !known[name].includes(value)) { button.disabled = true; button.title = "true masses were left out (--no-truth)"; }
      if (name === "sort" && value === "cost" && !D.truth) button.disabled = true;
      if (name === "sort" && value === "answer" && !D.answer_blocks.length) { button.disabled = true; button.title = "no block is known to hold an answer"; }
      button.addEventListener("click", () => { callsShown = CALLS; go({ [name]: name === "of" ? Number(value) : value }); });
    }
  for (const button of document.querySelectorAll("[data-step]"))
    button.addEventListener("click", () => step(button.dataset.step, Number(button.dataset.by)));
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => {
      if (button.dataset.zoom === "whole") go({ zoom: { ...WHOLE } });
      else maps[0].zoom(button.dataset.zoom === "in" ? 0.5 : 2, ...middle());
    });
  for (const id of ["ladders"]) $(id).addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-block]");
    if (row) go({ block: Number(row.dataset.block) });
  });
  $("more").addEventListener("click", () => { callsShown += CALLS; drawCalls(); });
  $("help").addEventListener("click", toggleHelp);
  $("theme").addEventListener("click", () => go({ theme: { "": "light", light: "dark", dark: "" }[state.theme] }));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  addEventListener("hashchange", () => { readAddress(); redraw(null); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(null));
  const n = (x) => x.toLocaleString("en");
  $("meta").textContent = `${D.model} · ${n(D.tokens)} tokens · ${n(D.blocks)} blocks of ${D.block} keys, ${n(D.tiles)} tiles of ${D.tile} rows · ${D.layers.length} layers × ${D.heads} heads`;
}

/* Zooming by the buttons goes to the cell that is selected, if it is in sight. */
function middle() {
  const at = (share, from) => (share - from) / state.zoom.span;
  const u = at((state.block + 0.5) / D.blocks, state.zoom.x), v = at((state.tile + 0.5) / D.tiles, state.zoom.y);
  return u >= 0 && u <= 1 && v >= 0 && v <= 1 ? [u, v] : [0.5, 0.5];
}

async function start() {
  if (typeof DecompressionStream === "undefined") {
    $("meta").textContent = "This browser is too old to unpack the page's data: it takes one from 2023 or later.";
    return;
  }
  readAddress();
  setTheme();
  wire();
  await openFacts();
  listeners.push(redraw);
  redraw(null);
  let waiting = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => { for (const map of maps) map.draw(); drawStrip(); });
  }).observe(document.body);
  document.documentElement.dataset.ready = "yes";
}
start();
