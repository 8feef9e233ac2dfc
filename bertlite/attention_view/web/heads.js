// The map of all heads, and the map of the chosen head.

const cells = new Map(); // {"layer.head": cell}
const figures = []; // of the chosen head: its canvas, and what it shows

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
  if (value) draw(add(cell, "canvas", { "aria-hidden": "true" }), value, shown, 72);
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

// The map of the chosen head ------------------------------------------------------------------------------------------

function addFigures() {
  const kinds = comparing ? [0, 1, "change"] : [0];
  for (const shown of kinds) {
    const figure = add(element("maps"), "figure"), caption = add(figure, "figcaption"), axes = add(figure, "div", { class: "axes" });
    const labels = {};
    if (size <= 18) for (const name of ["cols", "rows"]) {
      labels[name] = add(axes, "div", { class: `labels ${name}`, "aria-hidden": "true" });
      data.tokens.forEach((_, i) => addToken(labels[name], i));
    }
    const plot = add(axes, "div", { class: "plot" }), canvas = add(plot, "canvas", { role: "img" });
    const cross = ["row", "column"].map(() => add(plot, "div", { class: "cross", hidden: "" }));
    const named = shown === "change" ? "Change" : models[shown].name;
    figures.push({ shown, figure, caption, plot, canvas, cross, labels, named });
    const place = event => {
      const box = plot.getBoundingClientRect(), clamp = part => Math.min(size - 1, Math.max(0, Math.floor(part * size)));
      return [clamp((event.clientY - box.top) / box.height), clamp((event.clientX - box.left) / box.width)];
    };
    plot.addEventListener("pointermove", event => {
      const [from, to] = place(event);
      state.to = to;
      point(from);
      showCross();
    });
    plot.addEventListener("pointerleave", () => {
      state.to = null;
      point(state.kept);
      showCross();
    });
    plot.addEventListener("click", event => keep(place(event)[0]));
  }
}

function showFigures() {
  for (const { shown, figure, canvas, named } of figures) {
    const value = valueOf(state.maps, shown);
    figure.hidden = !value;
    if (!value) continue;
    draw(canvas, value, shown);
    canvas.setAttribute("aria-label", `${named}, layer ${state.layer}, head ${state.head}: the weights of ${size} tokens; the list beside the tokens has them as numbers`);
  }
  element("map").hidden = figures.every(({ figure }) => figure.hidden);
  showCross();
}

function showCross() { // the row of the chosen token, and the column that is pointed at
  const { token, to, maps } = state;
  for (const { shown, cross, labels, caption, named } of figures) {
    const [row, column] = cross, value = valueOf(maps, shown);
    row.hidden = token === null;
    column.hidden = token === null || to === null;
    Object.assign(row.style, { top: `${100 * token / size}%`, height: `${100 / size}%`, left: 0, right: 0 });
    Object.assign(column.style, { left: `${100 * to / size}%`, width: `${100 / size}%`, top: 0, bottom: 0 });
    labels.rows?.childNodes.forEach((node, i) => node.classList.toggle("on", i === token));
    labels.cols?.childNodes.forEach((node, i) => node.classList.toggle("on", i === to));
    const cell = !value || token === null || to === null ? ""
      : `${nameOf(token)} → ${nameOf(to)} ${shown === "change" ? `${signed(value(token, to))} points` : percent(value(token, to))}`;
    caption.textContent = cell || (comparing ? named : "Rows attend to columns");
  }
}
