// The tokens: two columns with lines from each to those that it attends to, or flowing text with shades, of many.

const SVG = "http://www.w3.org/2000/svg";
const FEWEST = 0.005; // lines of a chosen token with less are left out
const FEWEST_OF_ALL = 0.04; // and those of all tokens
const views = []; // of each model: its nodes, and what it shows of the chosen heads

function addView(model, m) {
  const box = add(element("views"), "div", { class: m ? "view second" : "view" });
  if (comparing) add(box, "h3", { text: model.name });
  const gone = add(box, "p", { class: "gone" }), body = add(box, "div");
  const ends = add(body, "div", { class: "ends", "aria-hidden": "true" });
  add(ends, "span", { text: "from" });
  const end = add(ends, "span");
  const tokens = add(body, "div", { class: "tokens" });
  const label = comparing ? `Tokens, in ${model.name}` : "Tokens";
  const from = add(tokens, "div", { class: "from", role: "listbox", "aria-label": label, "aria-describedby": "status" });
  const options = data.tokens.map((_, i) => {
    const option = addToken(from, i, { role: "option", "aria-selected": "false", tabindex: i ? -1 : 0, "data-token": i });
    option.setAttribute("aria-label", `${names[i]}, token ${i}`);
    option.prepend(add(option, "span", { class: "shade" }));
    add(option, "span", { class: "amount" });
    return option;
  });
  const svg = tokens.appendChild(document.createElementNS(SVG, "svg"));
  svg.setAttribute("class", "curves");
  svg.setAttribute("aria-hidden", "true");
  const to = add(tokens, "div", { class: "to", role: "list", "aria-label": label.replace("Tokens", "Weights") });
  const targets = data.tokens.map((_, i) => {
    const row = add(to, "div", { role: "listitem" }), bar = add(row, "span", { class: "bar" });
    addToken(row, i);
    return { row, bar, amount: add(row, "span", { class: "amount" }) };
  });
  views.push({ model, gone, body, end, tokens, from, options, svg, targets, shown: [], map: undefined });
}

function drawLines({ shown, svg }) { // the heaviest last, so that it lies on top
  svg.replaceChildren();
  if (long) return;
  const { token } = state, fewest = token === null ? FEWEST_OF_ALL : FEWEST, found = [];
  const [first, end] = token === null ? [0, size] : [token, token + 1];
  shown.forEach(({ map, slot }, n) => {
    const beside = 0.5 + 0.08 * (n - (shown.length - 1) / 2); // so that no head's line hides another's
    for (let i = first * size; i < end * size; i++)
      if (map[i] >= fewest * data.steps) found.push([Math.floor(i / size), i % size, map[i] / data.steps, slot, beside]);
  });
  svg.setAttribute("viewBox", `0 0 100 ${size}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const base = token === null ? 0.16 : 0.36, drawn = document.createDocumentFragment();
  for (const [from, to, weight, slot, beside] of found.sort((a, b) => a[2] - b[2])) {
    const path = drawn.appendChild(document.createElementNS(SVG, "path")), [a, b] = [from + beside, to + beside];
    path.setAttribute("d", `M0 ${a} C45 ${a} 55 ${b} 100 ${b}`);
    path.setAttribute("stroke-width", (0.8 + (token === null ? 6 : 9) * weight).toFixed(2));
    path.setAttribute("stroke-opacity", Math.min(0.95, base + 0.9 * weight).toFixed(2));
    if (isSeveral()) path.dataset.slot = slot;
    else if (special.has(to)) path.setAttribute("class", "to-special");
  }
  svg.append(drawn);
}

function drawAmounts(view) { // bars, shades and numbers: the weights of the chosen token, or what each receives on average
  const { map, shown, options, targets, end } = view, token = state.token;
  if (!map) return;
  end.textContent = token === null ? "to, on average" : "attends to";
  const amountsOf = map => token === null ? received(map) : Float64Array.from({ length: size }, (_, to) => weightOf(map, token, to));
  const amounts = amountsOf(map), parts = shown.map(({ map, slot }) => [amountsOf(map), slot]);
  const strong = new Set(Array.from(amounts.keys()).sort((a, b) => amounts[b] - amounts[a]).slice(0, 5));
  targets.forEach(({ row, bar, amount }, to) => {
    bar.style.width = `${100 * amounts[to]}%`;
    bar.style.background = isSeveral() ? stripes(parts.map(([each, slot]) => [each[to], slot])) : "";
    amount.textContent = amounts[to] >= 0.0005 ? percent(amounts[to]) : "";
    row.classList.toggle("strong", token !== null && strong.has(to) && amounts[to] >= 0.05);
  });
  options.forEach((option, i) => {
    option.setAttribute("aria-selected", i === token);
    option.firstElementChild.style.opacity = (0.4 * Math.sqrt(amounts[i])).toFixed(3);
    option.lastElementChild.textContent = token !== null && strong.has(i) && amounts[i] >= 0.01 ? percent(amounts[i]) : "";
  });
}

function stripes(amounts) { // a bar's background: of each [amount, slot] a stripe in the colour of its head
  const total = amounts.reduce((sum, [amount]) => sum + amount, 0) || 1;
  let end = 0;
  const stops = amounts.map(([amount, slot]) => `color-mix(in srgb, var(--slot-${slot}) 30%, transparent) ${100 * end / total}% ${100 * (end += amount) / total}%`);
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

function showSentence() { // everything that depends on the chosen heads and token
  views.forEach((view, m) => {
    view.shown = state.maps.map((maps, i) => ({ map: maps[m], slot: state.heads[i].slot })).filter(({ map }) => map);
    view.map = meanOf(view.shown.map(({ map }) => map));
    view.gone.hidden = Boolean(view.map);
    view.body.hidden = !view.map;
    view.gone.textContent = `${nameOfHeads()} pruned: ${view.model.name} does not have ${isSeveral() ? "them" : "it"}.`;
    drawLines(view);
    drawAmounts(view);
  });
  element("status").replaceChildren(...describeToken());
  element("every").toggleAttribute("data-off", state.kept === null);
}

function describeToken() { // what the chosen token attends to, in words
  const { token } = state;
  if (views.every(({ map }) => !map)) return [`${nameOfHeads()} pruned.`];
  if (token === null) {
    const shown = long ? "darker where more attention goes" : `lines below ${100 * FEWEST_OF_ALL}\u00a0% are left out`;
    return [`Every token; ${shown}. Point at one for its own.`];
  }
  const parts = [Object.assign(document.createElement("b"), { textContent: `\u2068${shortened(token)}\u2069` }), ` (token ${token}) attends to `];
  views.forEach(({ map }, m) => {
    if (comparing && m) parts.push("; ");
    if (!map) return parts.push(`nothing in ${models[m].name}, where ${isSeveral() ? "these heads are" : "this head is"} pruned`);
    parts.push(largest(map, token, comparing ? 3 : 5).filter(([, weight]) => weight >= 0.0005)
      .map(([to, weight]) => `${nameOf(to)} ${percent(weight)}`).join(", ") + (comparing ? ` in ${models[m].name}` : ""));
  });
  return [...parts, "."];
}

// A token is chosen for as long as the pointer or the focus is on it, and kept by a click, Enter or Space.
function listen({ from, options }) {
  const tokenAt = event => {
    const option = event.target.closest("[data-token]");
    return option ? Number(option.dataset.token) : null;
  };
  from.addEventListener("pointerover", event => event.pointerType === "mouse" && tokenAt(event) !== null && point(tokenAt(event)));
  from.addEventListener("pointerleave", event => event.pointerType === "mouse" && point(state.kept));
  from.addEventListener("focusin", event => {
    const i = tokenAt(event);
    options.forEach((option, j) => { option.tabIndex = i === j ? 0 : -1; });
    point(i);
  });
  from.addEventListener("focusout", () => point(state.kept));
  from.addEventListener("click", event => tokenAt(event) !== null && keep(tokenAt(event)));
  from.addEventListener("keydown", event => {
    const i = tokenAt(event), last = size - 1;
    const next = { ArrowDown: i + 1, ArrowRight: i + 1, ArrowUp: i - 1, ArrowLeft: i - 1, Home: 0, End: last }[event.key];
    if (next !== undefined) options[Math.min(Math.max(next, 0), last)].focus();
    else if (event.key === "Enter" || event.key === " ") keep(i);
    else return;
    event.preventDefault();
  });
}

function point(token) { // show one token's lines, or every token's for null
  if (token === state.token) return;
  state.token = token;
  showSentence();
}

function keep(token) { // keep it shown when the pointer leaves; once more lets go
  state.kept = state.kept === token ? null : token;
  state.token = undefined;
  point(state.kept);
}
