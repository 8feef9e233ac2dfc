// The map of all heads.

const cells = new Map(); // {"layer.head": cell}

function labelOf(layer, head) { // what a screen reader says of a cell, and what stands below the map
  const key = keyOf(layer, head), name = `layer ${layer}, head ${head}`, has = models.map(model => key in model.weights);
  if (!has.includes(true)) return `${name}: pruned`;
  if (has.includes(false)) return `${name}: pruned in ${models[has.indexOf(false)].name}`;
  if (comparing) return `${name}: ${percent(data.moved[key])} of its attention moved`;
  const shares = models[0].shares[key], most = shares.indexOf(Math.max(...shares));
  return `${name}: ${percent(shares[most])} of its attention goes to ${data.targets[most]}`;
}

function addGrid() {
  const grid = element("grid");
  grid.style.setProperty("--columns", data.heads.length);
  const top = add(grid, "div", { role: "row" });
  add(top, "div", { class: "corner", role: "columnheader", "aria-label": "layer" });
  for (const head of data.heads) add(top, "div", { class: "head-number", role: "columnheader", "aria-label": `head ${head}`, text: head });
  for (const layer of data.layers) {
    const row = add(grid, "div", { role: "row" });
    add(row, "div", { class: "layer-number", role: "rowheader", "aria-label": `layer ${layer}`, text: layer });
    for (const head of data.heads) {
      const label = labelOf(layer, head);
      const cell = add(row, "div", { class: "cell", role: "gridcell", tabindex: -1, "aria-selected": "false", "aria-label": label });
      cell.addEventListener("click", () => choose(layer, head, true));
      cell.addEventListener("pointerenter", () => { element("pointed").textContent = sentenceOf(label); });
      cells.set(keyOf(layer, head), cell);
    }
  }
  grid.addEventListener("pointerleave", () => { element("pointed").textContent = sentenceOf(labelOf(state.layer, state.head)); });
  grid.addEventListener("keydown", moveInGrid);
}

const sentenceOf = label => `${label[0].toUpperCase()}${label.slice(1)}.`;

function moveInGrid(event) {
  const row = data.layers.indexOf(state.layer), column = data.heads.indexOf(state.head);
  const lastRow = data.layers.length - 1, lastColumn = data.heads.length - 1;
  const moves = {
    ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
    Home: [event.ctrlKey ? 0 : row, 0], End: [event.ctrlKey ? lastRow : row, lastColumn],
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  const [y, x] = moves[event.key];
  if (y >= 0 && x >= 0 && y <= lastRow && x <= lastColumn) choose(data.layers[y], data.heads[x], true);
}

let drawing = 0; // the number of the newest drawing of the grid; an older one stops

async function drawGrid() { // a few maps at a time, so that the page answers meanwhile
  const mine = ++drawing, shown = state.shown;
  delete element("grid").dataset.drawn;
  let since = performance.now();
  for (const layer of data.layers) for (const head of data.heads) {
    const maps = await load(layer, head);
    if (mine !== drawing) return;
    drawCell(cells.get(keyOf(layer, head)), valueOf(maps, shown), maps, shown);
    if (performance.now() - since > 12) {
      await new Promise(resolve => setTimeout(resolve));
      since = performance.now();
    }
  }
  element("grid").dataset.drawn = shown;
}

function drawCell(cell, value, maps, shown) {
  cell.replaceChildren();
  cell.classList.toggle("missing", !value);
  if (value) draw(add(cell, "canvas", { "aria-hidden": "true" }), value, shown, cells.size > 16 ? 72 : size);
  else add(add(cell, "span", { "aria-hidden": "true" }), "b", { text: "pruned" });
}

function markCell() {
  for (const [key, cell] of cells) {
    const chosen = key === keyOf(state.layer, state.head);
    if (chosen === (cell.tabIndex === 0)) continue;
    cell.tabIndex = chosen ? 0 : -1;
    cell.setAttribute("aria-selected", chosen);
  }
}
