/**
 * Why a head looks from a query at a key: what each component that wrote the key's residual gives to the logit, less its
 * mean over the keys that the query sees. The numbers are those of `attnscope why`. Next to them the same components for
 * the keys with the largest logits: why there, and not here.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../types.js").Store} Store
 * @typedef {import("../types.js").WhyHead} WhyHead
 * @typedef {import("../types.js").Writer} Writer
 * @typedef {import("../data.js").Side} Side
 * @typedef {Writer & {place: number, contribution: number, contrast: number}} Row its place among the components
 */
import { latest, make, spoken } from "../canvas.js";
import { css, diverging, inkOn } from "../colours.js";
import { colourScale } from "../scales.js";
import { Strip } from "../strip.js";
import { named, short } from "./labels.js";

const KEPT = 12; // components that are shown at first
const KEYS = 10; // that are compared
const OFFERED = 12; // heads or queries that the page has instead
const LABEL = 8; // characters of a key that is compared
const SMALLEST = 0.1; // a sum of contrasts below this has no shares, as in attnscope/studies/attribution.py
const ALLOWED = 1e-5; // |sum - logit|, as a share of the sum of |terms|

/** @type {Mount} */
export function mount(element, page, store) {
  const drawing = latest();
  const keys = new Strip("key", store);
  const body = make("div", { class: "why" });
  let whole = false; // whether every component has its row
  element.append(keys.element, body);

  /** @param {State} state */
  async function render(state) {
    const still = drawing.begin();
    const side = page.side(state);
    const query = page.query(state);
    const head = side.data.why?.find((one) => one.at === state.at && one.head === state.head);
    const row = head ? head.queries.indexOf(query) : -1;
    const apart = head && row >= 0 ? await opened(side, head, row) : null;
    const key = (await page.keysOf(state))?.[0][0] ?? apart?.best ?? 0;
    if (!still()) return;
    keys.render(side, state.at, [[key, key + 1]]);
    const toggle = async () => {
      whole = !whole;
      await render(store.state);
      body.querySelector("button")?.focus(); // the button was made anew
    };
    body.replaceChildren(...(apart ? shown(side, apart, query, key, whole, toggle, store) : missing(side, state, query, head, store)));
  }

  return { render: (state) => void render(state) };
}

/** One query of one head. */
class Apart {
  /** @param {WhyHead} head @param {Float32Array} all of the head @param {number} row of the query @param {number} count of tokens */
  constructor(head, all, row, count) {
    const queries = head.queries.length;
    this.head = head;
    this.parts = head.components.map((_, one) => all.subarray((one * queries + row) * count, (one * queries + row + 1) * count));
    const from = (head.components.length * queries + row) * count;
    this.logits = all.subarray(from, from + count);
    this.seen = [...this.logits.keys()].filter((key) => !Number.isNaN(this.logits[key]));
    this.best = this.seen.reduce((best, key) => (this.logits[key] > this.logits[best] ? key : best), this.seen[0]);
    this.means = this.parts.map((part) => this.mean(part));
    this.level = this.mean(this.logits);
  }

  /** @param {ArrayLike<number>} values one for each token @returns {number} over the keys that the query sees */
  mean(values) {
    return this.seen.reduce((sum, key) => sum + values[key], 0) / this.seen.length;
  }

  /** @param {number} place of a component @param {number} key */
  contrast(place, key) {
    return this.parts[place][key] - this.means[place];
  }

  /** @param {number} key @returns {number[]} keys with the largest logits, the largest first, this one among them */
  strongest(key) {
    const keys = this.seen.toSorted((a, b) => this.logits[b] - this.logits[a]);
    const first = keys.slice(0, KEYS);
    return first.includes(key) ? first : [...first.slice(0, -1), key];
  }

  /** @param {number} key @returns {Row[]} the largest contrasts first */
  rows(key) {
    const rows = this.head.components.map((one, place) => {
      return { ...one, place, contribution: this.parts[place][key], contrast: this.contrast(place, key) };
    });
    return rows.sort((a, b) => Math.abs(b.contrast) - Math.abs(a.contrast));
  }
}

/** @param {Side} side @param {WhyHead} head @param {number} row */
async function opened(side, head, row) {
  const size = (head.components.length + 1) * head.queries.length * side.count;
  return new Apart(head, await side.blobs.floats(head, size), row, side.count);
}

/**
 * @param {Side} side @param {Apart} apart @param {number} query @param {number} key @param {boolean} whole
 * @param {() => Promise<void>} toggle @param {Store} store
 */
function shown(side, apart, query, key, whole, toggle, store) {
  const { head, logits, seen } = apart;
  const units = side.tokenUnits;
  const title = make("h2", {}, `Why ${side.name(head.at, head.head)} looks from ${named(units, query)} at ${named(units, key)}`);
  if (!seen.includes(key)) return [title, make("p", { class: "note" }, "This query does not see this key: choose another.")];
  const rows = apart.rows(key);
  const above = logits[key] - apart.level;
  const some = rows.slice(0, whole ? rows.length : KEPT);
  const more = rows.length > KEPT && make("button", { type: "button", onclick: toggle }, whole ? "Largest alone" : `All ${rows.length} components`);
  return [
    make("div", { class: "legend" }, title, more),
    make("p", { "data-role": "line" }, inWords(named(units, key), rows, above, seen.length)),
    make(
      "div",
      { class: "with-beside" },
      table(side, rows, some, above, logits[key], key, store),
      seen.length > 1 && compared(side, apart, some, rows.slice(some.length), key, store),
    ),
    ...notes(head, rows, logits[key]),
  ];
}

/** @param {string} key @param {Row[]} rows @param {number} above @param {number} seen */
function inWords(key, rows, above, seen) {
  const largest = rows.slice(0, 2).map(({ name, contrast }) => `${name} ${signed(contrast)}`);
  const stands = `${number(Math.abs(above))} ${above < 0 ? "below" : "above"} the mean of the ${seen} keys that the query sees`;
  return `The logit of ${key} is ${stands}. Largest: ${largest.join(" and ")}.`;
}

/**
 * @param {Side} side @param {Row[]} rows @param {Row[]} some that are shown
 * @param {number} above @param {number} logit @param {number} key @param {Store} store
 */
function table(side, rows, some, above, logit, key, store) {
  const most = Math.max(...rows.map(({ contrast }) => Math.abs(contrast))) || 1;
  const share = (/** @type {number} */ one) => (Math.abs(above) < SMALLEST ? "–" : number(one / above));
  const cells = (/** @type {number} */ contrast, /** @type {number} */ contribution) =>
    [signed(contrast), share(contrast), signed(contribution)].map((text) => make("td", {}, text));
  const heads = ["contrast", "share", "contribution"].map((title) => make("th", { scope: "col" }, title));
  const head = make("tr", {}, make("th", { scope: "col", class: "words" }, "component"), make("th", { scope: "col" }, spoken("contrast as a bar")), ...heads);
  const body = some.map((row) =>
    make(
      "tr",
      { "data-component": row.name },
      make("th", { scope: "row", class: "words" }, writer(side, row, key, store)),
      make("td", { class: "signed-cell" }, bar(row.contrast / most)),
      ...cells(row.contrast, row.contribution),
    ),
  );
  const rest = rows.slice(some.length);
  const total = (/** @type {"contrast"|"contribution"} */ name) => rest.reduce((sum, row) => sum + row[name], 0);
  const line = (/** @type {string} */ name, /** @type {string} */ kind, /** @type {HTMLElement[]} */ values) =>
    make("tr", { class: kind }, make("th", { scope: "row", class: "words" }, name), make("td", {}), ...values);
  if (rest.length) body.push(line(`${rest.length} others`, "unseen", cells(total("contrast"), total("contribution"))));
  body.push(line("logit", "sum", cells(above, logit)));
  return make(
    "div",
    { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "What each component gives to this key" },
    make("table", { class: "numbers" }, make("thead", {}, head), make("tbody", {}, ...body)),
  );
}

/**
 * The same components, of the keys with the largest logits; a click on a key chooses it.
 *
 * @param {Side} side @param {Apart} apart @param {Row[]} some that are shown @param {Row[]} rest the others
 * @param {number} key @param {Store} store
 */
function compared(side, apart, some, rest, key, store) {
  const keys = apart.strongest(key);
  const most = Math.max(...some.flatMap(({ place }) => keys.map((one) => Math.abs(apart.contrast(place, one))))) || 1;
  const ramp = diverging();
  const choose = (/** @type {number} */ one) => {
    const title = named(side.tokenUnits, one);
    const says = [make("span", {}, String(side.tokenUnits.number(one))), make("span", { class: "token" }, short(side.tokenUnits.label[one], LABEL))];
    const onclick = () => store.set({ key: one, keyEnd: null, group: "" });
    return make("button", { type: "button", title, "data-key": one, "aria-pressed": String(one === key), onclick }, ...says);
  };
  const value = (/** @type {Row} */ { place }, /** @type {number} */ one) => {
    const contrast = apart.contrast(place, one);
    const cell = make("td", {}, signed(contrast));
    const share = (1 + contrast / most) / 2;
    [cell.style.backgroundColor, cell.style.color] = [css(ramp, share), inkOn(ramp, share)];
    return cell;
  };
  const heads = keys.map((one) => make("th", { scope: "col" }, choose(one)));
  const body = some.map((row) => make("tr", { "data-of": row.name }, make("th", { scope: "row", class: "words" }, row.name), ...keys.map((one) => value(row, one))));
  const line = (/** @type {string} */ name, /** @type {string} */ kind, /** @type {(key: number) => number} */ sum) =>
    make("tr", { class: kind }, make("th", { scope: "row", class: "words" }, name), ...keys.map((one) => make("td", {}, signed(sum(one)))));
  const others = (/** @type {number} */ one) => rest.reduce((sum, { place }) => sum + apart.contrast(place, one), 0);
  if (rest.length) body.push(line(`${rest.length} others`, "unseen", others));
  body.push(line("logit", "sum", (one) => apart.logits[one] - apart.level));
  return make(
    "aside",
    { "aria-label": "Contrasts of other keys" },
    make("div", { class: "legend" }, make("h2", {}, "Contrasts of the keys with the largest logits"), colourScale(-most, most, ramp)),
    make(
      "div",
      { class: "table-scroll", tabindex: 0, role: "group", "aria-label": "What each component gives to other keys" },
      make("table", { class: "numbers keys-by-part" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, spoken("component")), ...heads)), make("tbody", {}, ...body)),
    ),
  );
}

/** A head opens at this key, where it wrote. @param {Side} side @param {Row} row @param {number} key @param {Store} store */
function writer(side, { name, at, head }, key, store) {
  if (at === undefined || head === undefined || !side.headAt(at, head)) return name;
  const opens = () => store.set({ view: "head", at, head, query: key, key: null, keyEnd: null, group: "" });
  const title = `${name}: where it looks from ${named(side.tokenUnits, key)}`;
  return make("button", { type: "button", class: "writer", "data-head": `${at}.${head}`, title, onclick: opens }, name);
}

/** @param {number} share -1 to 1 */
export function bar(share) {
  const made = make("i", { class: share < 0 ? "signed less" : "signed" });
  made.style.setProperty("--share", String(Math.abs(share)));
  return made;
}

/** @param {WhyHead} head @param {Row[]} rows @param {number} logit */
function notes(head, rows, logit) {
  const [sum, size] = rows.reduce(([all, far], { contribution: one }) => [all + one, far + Math.abs(one)], [0, 0]);
  const off = Math.abs(sum - logit);
  const holds = off <= ALLOWED * size;
  const check = `${holds ? "✓" : "✗"} the contributions sum to ${number(sum)}, the logit is ${number(logit)}`;
  const says = [
    "Contribution: the part of this key's logit from one component, before the softmax, with the scale of norms held fixed.",
    "Contrast: the contribution minus its mean over visible keys. What all keys share has no effect on the softmax.",
    head.sinks && "This head has a sink logit, so that what all keys share has an effect.",
    head.cap !== null && `This family then caps the logit at ${number(head.cap)}.`,
  ];
  return [
    make("p", { class: holds ? "holds" : "fails", "data-role": "check" }, check),
    make("p", { class: "note" }, says.filter(Boolean).join(" ")),
  ];
}

/** As `attnscope why` writes it. @param {number} value */
const number = (value) => value.toFixed(3).replace("-", "−");

/** @param {number} value */
const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));

/** @param {Side} side @param {State} state @param {number} query @param {WhyHead|undefined} head @param {Store} store */
function missing(side, state, query, head, store) {
  const name = side.name(state.at, state.head);
  const button = (/** @type {string} */ text, /** @type {Partial<State>} */ change, /** @type {Record<string, string|number>} */ what) =>
    make("button", { type: "button", ...what, onclick: () => store.set(change) }, text);
  const of = head ? `query ${named(side.tokenUnits, query)} of ${name}` : name;
  const there = head
    ? head.queries.map((one) => button(named(side.tokenUnits, one, 16), { query: one }, { "data-query": one }))
    : (side.data.why ?? []).map((one) => button(side.name(one.at, one.head), { at: one.at, head: one.head }, { "data-head": `${one.at}.${one.head}` }));
  const command = `attnscope why --head ${name} --query ${side.number(query)} takes it apart`;
  const says = `This page has no logits for ${of}: ${command}.${there.length ? " It has those for" : ""}`;
  return [make("p", { class: "note" }, says), make("div", { class: "legend" }, ...there.slice(0, OFFERED))];
}
