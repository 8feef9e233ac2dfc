// What is chosen, and the start.

const state = {
  layer: null, head: null, // the current head: chosen last, or reached by the arrow keys
  heads: [], maps: [], // the chosen heads, {layer, head, slot}; of each, its map in each model
  several: false, // whether a click adds a head to the others, or takes it away
  token: null, // whose lines are shown; null for every token
  kept: null, // which token is shown when none is pointed at
  shown: comparing ? "change" : 0, // in the map of all heads
};

let asked = 0; // the number of the newest choice; an older one that is still loading is dropped

const MOST_HEADS = 8; // at once: as many as there are colours, --slot-0 to --slot-7
const isSeveral = () => state.heads.length > 1;
const nameOfHeads = () => isSeveral() ? "These heads are" : `Layer ${state.heads[0].layer}, head ${state.heads[0].head} is`;

function chosenWith(layer, head) { // the heads that a choice leaves chosen; each keeps the slot of its colour
  if (!state.several) return [{ layer, head, slot: 0 }];
  const others = state.heads.filter(each => each.layer !== layer || each.head !== head);
  if (others.length < state.heads.length) return others.length ? others : state.heads;
  if (others.length === MOST_HEADS) return others;
  const free = [...Array(MOST_HEADS).keys()].find(slot => others.every(each => each.slot !== slot));
  return [...others, { layer, head, slot: free }];
}

async function choose(layer, head, focus = false) {
  const mine = ++asked, heads = chosenWith(layer, head), full = heads.length === MOST_HEADS && heads.length === state.heads.length;
  Object.assign(state, { layer, head, heads });
  markCells();
  if (focus) cells.get(keyOf(layer, head)).focus({ preventScroll: false });
  const maps = await Promise.all(heads.map(each => load(each.layer, each.head)));
  if (mine !== asked) return;
  state.maps = maps;
  const [one] = heads, isFirst = one.layer === data.first.head[0] && one.head === data.first.head[1];
  element("chosen").textContent = isSeveral() ? `${heads.length} heads` : `Layer ${one.layer}, head ${one.head}`;
  const lost = maps.some(each => each.includes(undefined)) ? ", except pruned ones" : "";
  element("why").textContent = isSeveral() ? `${full ? `No more than ${MOST_HEADS} at once. ` : ""}Numbers are averages over these heads${lost}.`
    : isFirst ? data.first.why : sentenceOf(labelOf(one.layer, one.head));
  element("pointed").textContent = sentenceOf(labelOf(layer, head));
  drawLegend();
  showSentence();
}

function addSwitch(parent, choices, chosen, use) { // choices: [value, text]
  for (const [value, text] of choices) {
    const button = add(parent, "button", { type: "button", text, title: text, "aria-pressed": value === chosen });
    button.addEventListener("click", () => {
      for (const other of parent.children) other.setAttribute("aria-pressed", other === button);
      use(value);
    });
  }
}

function writeFacts() {
  const count = (number, unit) => `${number} ${unit}${number === 1 ? "" : "s"}`;
  const counts = `${count(data.layers.length, "layer")} × ${count(data.heads.length, "head")}, ${count(size, "token")}`;
  element("facts").textContent = `${models.map(model => model.name).join(" and ")} · ${counts}`;
  const pruned = models.map(model => cells.size - Object.keys(model.weights).length);
  const gone = pruned.map((lost, m) => lost ? `${lost} ${lost === 1 ? "head is" : "heads are"} pruned${comparing ? ` in ${models[m].name}` : ""} (hatched)` : "");
  const colours = comparing ? `Change: blue is more weight in ${models[0].name}, orange more in ${models[1].name}.` : "";
  element("grid-note").textContent = [colours, ...gone.filter(Boolean).map(text => `${text}.`)].filter(Boolean).join(" ");
  element("rounding").textContent = `Heads have the numbers of the unpruned model. Weights on this page are rounded to 1/${data.steps},`
    + ` so that each is right to within ${(50 / data.steps).toFixed(3)} percentage points.`;
}

function listenToPage() {
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape") return;
    state.kept = null;
    state.token = undefined;
    point(null);
  });
  const redraw = () => {
    readColours();
    drawGrid();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) addEventListener(event, () => {
    document.documentElement.toggleAttribute("data-print", printing);
    if (matchMedia("(prefers-color-scheme: dark)").matches) redraw();
  });
  element("several").addEventListener("click", () => {
    setSeveral(!state.several);
    if (!state.several) choose(state.layer, state.head);
  });
  element("every").addEventListener("click", () => {
    state.kept = null;
    point(null);
    views.find(view => view.map)?.options.find(option => option.tabIndex === 0)?.focus();
    point(null);
  });
}

async function start() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream; use one of 2023 or later");
  const style = document.documentElement.style;
  style.setProperty("--row", size <= 18 ? "clamp(30px, 2.6vw, 40px)" : size <= 28 ? "26px" : "22px");
  style.setProperty("--count", size);
  readColours();
  models.forEach(addView);
  if (comparing) addSwitch(element("shown"), [[0, models[0].name], [1, models[1].name], ["change", "Change"]], "change", shown => {
    state.shown = shown;
    drawGrid();
  });
  addGrid();
  writeFacts();
  document.querySelector("main").className = comparing ? "two" : "";
  document.querySelector("main").hidden = false;
  element("views").className = `${long ? "text" : "lines"}${comparing ? " two" : ""}`;
  await choose(...data.first.head);
  if (long) keep(data.first.token); // all tokens at once are too many to read
  views.forEach(listen);
  listenToPage();
  document.documentElement.dataset.ready = "";
  await drawGrid();
}

start().catch(error => {
  element("failure").textContent = `This page could not be drawn: ${error.message}`;
  element("failure").hidden = false;
  throw error;
});
