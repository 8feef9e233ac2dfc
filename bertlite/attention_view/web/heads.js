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
      cell.addEventListener("click", event => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) setSeveral(true);
        choose(layer, head, true);
      });
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
  if (!(event.key in moves) && event.key !== " " && event.key !== "Enter") return;
  event.preventDefault();
  if (!(event.key in moves)) return choose(state.layer, state.head, true);
  const [y, x] = moves[event.key];
  if (y >= 0 && x >= 0 && y <= lastRow && x <= lastColumn) (state.several ? moveTo : choose)(data.layers[y], data.heads[x], true);
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

function markCells() { // the chosen ones, and the current one, from which the arrow keys go on
  for (const [key, cell] of cells) {
    const chosen = state.heads.find(each => keyOf(each.layer, each.head) === key);
    cell.tabIndex = key === keyOf(state.layer, state.head) ? 0 : -1;
    cell.setAttribute("aria-selected", Boolean(chosen));
    if (chosen && isSeveral()) cell.dataset.slot = chosen.slot;
    else delete cell.dataset.slot;
  }
}

function moveTo(layer, head) { // the focus, while several heads are chosen
  Object.assign(state, { layer, head });
  markCells();
  cells.get(keyOf(layer, head)).focus();
  element("pointed").textContent = sentenceOf(labelOf(layer, head));
}

function setSeveral(several) {
  state.several = several;
  element("several").setAttribute("aria-pressed", several);
  element("grid").setAttribute("aria-multiselectable", several);
}

function drawLegend() { // a button for each of several heads, in its colour, that takes it away
  element("legend").replaceChildren();
  if (isSeveral()) for (const { layer, head, slot } of state.heads) {
    const button = add(element("legend"), "button", { type: "button", "data-slot": slot, "aria-label": `Remove layer ${layer}, head ${head}`, text: `Layer ${layer}, head ${head}` });
    button.addEventListener("click", () => choose(layer, head));
  }
}
