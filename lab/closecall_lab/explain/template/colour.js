/* Colours: ramps of one hue that rise in lightness, blue against orange where there are two sides; no red or green. */
const RAMPS = {
  light: {
    mass: ["#f1f4f8", "#c3d9ee", "#6fabd6", "#1f6fb4", "#082f63"],
    lost: ["#f4f1ee", "#fbd3a8", "#f29a4a", "#c75000", "#5e2200"],
    kept: ["#eef1f5", "#bcd6ec", "#6aaada", "#1f78bd", "#0a4a80"],
    side: ["#a84300", "#e58a3c", "#f6dcc2", "#f4f4f4", "#c4dcf0", "#4a98d2", "#08508f"],
    below: ["#eef0f3", "#f8d9b8", "#e07b1f"], above: ["#a3cdee", "#2f85c8", "#083f70"],
  },
  dark: {
    mass: ["#1b222c", "#1d3f63", "#2874b3", "#74bdf5", "#eaf6ff"],
    lost: ["#221f1d", "#5a2f10", "#b3590f", "#ff9a4d", "#fff0dc"],
    kept: ["#1f2630", "#1d4468", "#2b78b8", "#5fb2f2", "#d5edff"],
    side: ["#ffb27a", "#c5671c", "#5a3414", "#262b33", "#173d5e", "#2b7cbd", "#8bcaff"],
    below: ["#212832", "#5e3a17", "#f58b33"], above: ["#23608f", "#4aa5ea", "#d9efff"],
  },
};
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
function ramp(stops) {
  const colours = stops.map(rgb);
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (colours.length - 1), k = Math.min(colours.length - 2, Math.floor(at));
    return colours[k].map((c, j) => Math.round(c + (colours[k + 1][j] - c) * (at - k)));
  });
}

let dark = false, ramps = {}, named = {}, solid = {};
function setTheme() {
  dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.toggleAttribute("data-dark", dark);
  document.getElementById("theme").textContent = state.theme === "" ? "colours: system" : "colours: " + state.theme;
  const stops = RAMPS[dark ? "dark" : "light"];
  ramps = Object.fromEntries(Object.entries(stops).map(([name, list]) => [name, ramp(list)]));
  ramps.score = [...ramps.below.filter((_, i) => i % 2 === 1), ...ramps.above.filter((_, i) => i % 2 === 0)];
  const style = getComputedStyle(document.documentElement);
  for (const name of ["page", "panel", "ink", "quiet", "line", "kept", "forced", "dropped", "both", "first", "second", "mark"])
    named[name] = style.getPropertyValue("--" + name).trim();
  solid = Object.fromEntries(Object.entries(named).map(([name, hex]) => [name, rgb(hex)]));
}

/* From 0 to 1 along a ramp. */
const along = (name, t) => ramps[name][Math.max(0, Math.min(255, Math.round(255 * t)))];
const css = (colour) => `rgb(${colour.join()})`;

/* Most masses are small and a few are large: the cube root tells both apart. */
const massTone = (m) => Math.cbrt(m);
const massKeys = (name, says) =>
  [0, 0.001, 0.01, 0.1, 0.5, 1].map((m, i) => [css(along(name, massTone(m))), (i ? "" : says + " ") + percent(m)]);
/* A score's place: fading away below the cut, deepening above it; the two meet in different colours at the cut. */
const scoreTone = (x) => (x > 0 ? 128 + 127 * Math.sqrt(Math.min(1, x)) : 127 - 127 * Math.sqrt(Math.min(1, -x))) / 255;
const sideTone = (x) => 0.5 + 0.5 * Math.sign(x) * Math.sqrt(Math.min(1, Math.abs(x)));

/* The colour of a map's cell. `exact`: one head, so that kept is yes or no. */
function tone(view, value, isForced, exact) {
  if (view === "kept") {
    if (isForced) return solid.forced;
    return exact ? (value > 0.5 ? solid.kept : solid.dropped) : along("kept", value);
  }
  if (view === "score") return isForced || Number.isNaN(value) ? solid.forced : along("score", scoreTone(value));
  return along(view, massTone(value));
}
function differenceTone(view, a, b, exact) {
  if (view === "kept" && exact) {
    if (a > 0.5) return b > 0.5 ? solid.both : solid.first;
    return b > 0.5 ? solid.second : solid.dropped;
  }
  if (Number.isNaN(a) || Number.isNaN(b)) return solid.forced;
  return along("side", sideTone(view === "kept" ? a - b : view === "score" ? (a - b) / 2 : 3 * (a - b)));
}
function ink(colour) {
  return 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] > 140 ? "#000" : "#fff";
}

/* Legends. A key is [colour or ramp, text]. */
function legend(id, keys) {
  const place = typeof id === "string" ? document.getElementById(id) : id;
  place.replaceChildren(...keys.map(([look, text, after]) => {
    const key = document.createElement("span"), sample = document.createElement("i");
    key.className = "key";
    if (look === "mark") { sample.className = "mark"; sample.textContent = "▲"; }
    else if (Array.isArray(look)) {
      sample.className = "ramp";
      const stops = Array.from({ length: 9 }, (_, i) => css(look[Math.round((i * 255) / 8)]));
      sample.style.background = `linear-gradient(to right, ${stops.join()})`;
    } else sample.style.background = look;
    key.append(...(after ? [text, sample, after] : [sample, text]));
    return key;
  }));
}
function mapKeys(view, exact) {
  if (view === "kept" && exact) return [[named.kept, "kept"], [named.forced, "forced"], [named.dropped, "dropped"]];
  if (view === "kept") return [[ramps.kept, "kept by no head", "by all"], [named.forced, "forced"]];
  if (view === "score") {
    const at = (x) => css(along("score", scoreTone(x)));
    return [[at(1), "best"], [at(0.3), "kept"], [at(0.002), "barely kept"], [at(0), "barely dropped"], [at(-0.3), "dropped"], [at(-1), "far below"], [named.forced, "forced, not ranked"]];
  }
  return massKeys(view, view === "mass" ? "true mass" : "lost mass");
}
function differenceKeys(view, exact) {
  const [a, b] = SHORT;
  if (view === "kept" && exact) return [[named.first, `only ${a}`], [named.second, `only ${b}`], [named.both, "both"], [named.dropped, "neither"]];
  return [[ramps.side, `difference: more in ${b}`, `more in ${a}`]];
}
