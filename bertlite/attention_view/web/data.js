// The data of the page, and small helpers.  Tokens reach the page as text alone, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const size = data.tokens.length, models = data.models, comparing = models.length === 2;
const special = new Set(data.special);
const long = size > 36; // tokens then flow as text, since columns of them would not fit a screen
const element = id => document.getElementById(id);
const keyOf = (layer, head) => `${layer}.${head}`;
const decoded = models.map(() => new Map()); // {"layer.head": steps, row by row} of each model

function add(parent, name, { text, ...attributes } = {}) { // a new element at the end of another
  const child = parent.appendChild(document.createElement(name));
  if (text !== undefined) child.textContent = text;
  for (const [key, value] of Object.entries(attributes)) child.setAttribute(key, value);
  return child;
}

function percent(weight) {
  const number = 100 * weight;
  return `${number === 0 ? 0 : number < 0.1 ? "<0.1" : number.toFixed(number < 9.95 ? 1 : 0)}\u00a0%`;
}

// What has no shape of its own is written as its code point, such as U+200B, so that every token can be seen.
const names = data.tokens.map(token => {
  const shown = token.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, letter => `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`);
  if (!shown.trim()) return shown ? "space" : "empty";
  return /^\p{M}/u.test(shown) ? `\u25cc${shown}` : shown; // a mark needs a letter to stand on
});

const repeated = new Set(names.filter((name, i) => names.indexOf(name) !== i)); // which need their place to be told apart
const shortened = i => names[i].length > 24 ? `${[...names[i]].slice(0, 22).join("")}…` : names[i];
const nameOf = i => `\u2068${shortened(i)}\u2069${repeated.has(names[i]) ? ` (${i})` : ""}`; // isolated from its neighbours

function addToken(parent, i, attributes = {}) { // the token at position i, kept apart from the direction of its neighbours
  const node = add(parent, "span", { class: special.has(i) ? "token special" : "token", ...attributes });
  if (names[i].length > 12) node.title = names[i]; // which may not fit
  const inner = add(node, "bdi");
  const continued = names[i].startsWith("##") && names[i].length > 2;
  if (continued) node.classList.add("continued"), add(inner, "i", { text: "##" });
  inner.append(continued ? names[i].slice(2) : names[i]);
  return node;
}

// Weights -------------------------------------------------------------------------------------------------------------

async function decode(text) { // base64 of zlib: the low bytes of all steps, then the high ones
  const packed = atob(text), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const plain = new Uint8Array(await new Response(stream).arrayBuffer()), steps = new Uint16Array(size * size);
  for (let i = 0; i < steps.length; i++) steps[i] = plain[i] | plain[steps.length + i] << 8;
  return steps;
}

async function load(layer, head) { // the steps of a head in each model; undefined where it is pruned
  const key = keyOf(layer, head);
  return Promise.all(models.map(async (model, m) => {
    if (!(key in model.weights)) return undefined;
    if (!decoded[m].has(key)) decoded[m].set(key, await decode(model.weights[key]));
    return decoded[m].get(key);
  }));
}

const weightOf = (map, from, to) => map[from * size + to] / data.steps;

function meanOf(maps) { // of one head it is its own map
  if (maps.length < 2) return maps[0];
  return Float32Array.from(maps[0], (_, i) => maps.reduce((sum, map) => sum + map[i], 0) / maps.length);
}

function received(map) { // by each token, on average over all tokens
  const sums = new Float64Array(size);
  for (let i = 0; i < map.length; i++) sums[i % size] += map[i];
  return sums.map(sum => sum / data.steps / size);
}

function largest(map, from, count) { // [to, weight], the largest first
  return Array.from({ length: size }, (_, to) => [to, weightOf(map, from, to)]).sort((a, b) => b[1] - a[1]).slice(0, count);
}

// Colours -------------------------------------------------------------------------------------------------------------

let palettes; // of 256 colours: the first model's, blue, the second's, orange, and of changes, from blue to orange

function mix(stops, position) { // position 0 to 1 between colours written as #rrggbb; as a canvas stores a pixel
  const scaled = position * (stops.length - 1), low = Math.min(Math.floor(scaled), stops.length - 2), part = scaled - low;
  const [red, green, blue] = [1, 3, 5].map(i => {
    const [a, b] = [stops[low], stops[low + 1]].map(stop => parseInt(stop.slice(i, i + 2), 16));
    return Math.round(a + (b - a) * part);
  });
  return (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
}

function readColours() {
  const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(`--${name}`).trim();
  const scale = stops => Uint32Array.from({ length: 256 }, (_, i) => mix(stops, i / 255));
  const low = colour("map-low"), blue = ["map-mid", "map-high"].map(colour), orange = ["map-mid-2", "map-high-2"].map(colour);
  palettes = { 0: scale([low, ...blue]), 1: scale([low, ...orange]), change: scale([...blue.toReversed(), low, ...orange]) };
}

function draw(canvas, value, shown, most = size) { // value(from, to) is 0 to 1, or -1 to 1 where it is a change
  const block = Math.ceil(size / most), side = Math.ceil(size / block), colours = palettes[shown], change = shown === "change";
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d"), pixels = context.createImageData(side, side);
  const cells32 = new Uint32Array(pixels.data.buffer);
  for (let y = 0; y < side; y++) for (let x = 0; x < side; x++) {
    let found = 0; // of a block of weights, the one furthest from 0
    for (let from = y * block; from < Math.min(size, (y + 1) * block); from++)
      for (let to = x * block; to < Math.min(size, (x + 1) * block); to++) {
        const each = value(from, to);
        if (Math.abs(each) > Math.abs(found)) found = each;
      }
    const shade = Math.sign(found) * Math.sqrt(Math.abs(found));
    cells32[y * side + x] = colours[Math.round(255 * (change ? (shade + 1) / 2 : shade))];
  }
  context.putImageData(pixels, 0, 0);
}

function valueOf(maps, shown) { // the function to draw: of the first model, the second, or their difference
  if (shown === "change") return maps[0] && maps[1] && ((from, to) => weightOf(maps[1], from, to) - weightOf(maps[0], from, to));
  return maps[shown] && ((from, to) => weightOf(maps[shown], from, to));
}
