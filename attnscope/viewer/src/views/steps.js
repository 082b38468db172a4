/**
 * One query of one head, step by step, as `attnscope explain` tells it: the page has its words, the numbers are computed
 * here in float64 from the page's q, k and v, and compared with the page's map.
 *
 * @typedef {import("../types.js").State} State
 * @typedef {import("../types.js").Mount} Mount
 * @typedef {import("../types.js").StepsHead} StepsHead
 * @typedef {import("../data.js").Page} Page
 * @typedef {import("../data.js").Side} Side
 * @typedef {import("../types.js").StepArray} StepArray
 * @typedef {import("./arithmetic.js").Steps} Steps
 *
 * @typedef {object} Column of a table with a row for each key
 * @property {string} title
 * @property {(key: number) => string} cell
 * @property {string} [sum]
 * @property {boolean} [vector] whether its cells are numbers of a vector, which are below one another
 * @property {(key: number) => HTMLElement} [strip] what its cells are instead of text
 */
import { latest, make, spoken } from "../canvas.js";
import { said } from "../data.js";
import { foremost, length, number, numbers, opened, stepsOf, strip, total } from "./arithmetic.js";
import { named, short } from "./labels.js";

const FIRST = 4; // numbers shown of a vector
const IN_COLUMN = 3; // and of one in a column beside others
const MOST_KEYS = 12; // more than that: the strongest are shown
const KEPT_KEYS = 10;

/** By an array: what is drawn beside it. @type {Record<string, [id: string, title: string][]>} */
const STRIPS = { k: [["k", "k"], ["products", "q × k"]], weighted: [["weighted", "weight × v"]] };

/** @type {Mount} */
export function mount(element, page, store) {
  const drawing = latest();
  const body = make("div", { class: "steps" });
  let whole = false; // whether every key has its row
  element.classList.add("steps-view");
  element.append(body);
  body.addEventListener("click", (event) => {
    const row = /** @type {HTMLElement|null} */ (/** @type {Element} */ (event.target).closest("tr[data-token]"));
    if (row) store.set({ key: Number(row.dataset.token), keyEnd: null });
  });

  /** @param {State} state */
  async function render(state) {
    const side = page.side(state);
    const head = side.data.steps?.heads.find((one) => one.at === state.at && one.head === state.head);
    const still = drawing.begin();
    if (!head) return body.replaceChildren(...missing(side, state, store));
    const [operands, map, reach] = await Promise.all([
      opened(side, head),
      side.map(state.at, state.head),
      side.reach(state.at),
    ]);
    if (!still()) return;
    const query = page.query(state);
    const steps = stepsOf(head, operands, query, [reach.from(query), reach.to(query)]);
    const all = { type: "button", onclick: () => ((whole = !whole), void render(store.state)) };
    const more = side.count > MOST_KEYS && make("button", all, whole ? "Strongest keys" : "All keys");
    const shown = new Explained(side, head, steps, whole ? side.count : KEPT_KEYS, state.key);
    body.replaceChildren(shown.headline(more), ...shown.sections(), shown.summary(map));
  }

  return { render: (state) => void render(state) };
}

/** @param {Side} side @param {State} state @param {import("../types.js").Store} store */
function missing(side, state, store) {
  const there = side.data.steps?.heads ?? [];
  const says = `This page has no q, k and v for ${side.name(state.at, state.head)}`;
  if (!there.length)
    return [make("p", { class: "note" }, `${says}. Pages of short texts have them, and so has attnscope explain.`)];
  const buttons = there
    .slice(0, 12)
    .map(({ at, head }) =>
      make(
        "button",
        { type: "button", "data-head": `${at}.${head}`, onclick: () => store.set({ at, head }) },
        side.name(at, head),
      ),
    );
  return [make("p", { class: "note" }, `${says}, but for`), make("div", { class: "legend" }, ...buttons)];
}

/** The steps as tables. */
class Explained {
  /** @param {Side} side @param {StepsHead} head @param {Steps} steps @param {number} most @param {number|null} key */
  constructor(side, head, steps, most, key) {
    this.side = side;
    this.head = head;
    this.steps = steps;
    this.key = key;
    this.units = side.tokenUnits;
    this.keys = kept(steps, most, key);
  }

  /** @param {HTMLElement|false} more */
  headline(more) {
    const { side, head, steps, units } = this;
    const name = `${side.name(head.at, head.head)}, step by step, for query ${named(units, steps.query)}`;
    return make("div", { class: "legend" }, make("h2", {}, name), more);
  }

  /** @returns {HTMLElement[]} numbered, in the words of `attnscope explain` */
  sections() {
    const { steps, side, head } = this;
    const { words, sees } = /** @type {import("../types.js").StepsData} */ (side.data.steps);
    const seen = steps.visible.reduce((count, one) => count + one, 0);
    const hidden = side.count - seen;
    const values = { keys: side.count, sight: filled(sees[hidden ? 1 : 0], { seen, hidden }) };
    return words[head.words].map(({ name, formula, why, arrays }, place) =>
      make(
        "section",
        { class: "step", "data-step": name },
        make("h3", {}, `${place + 1}  ${name}`),
        make("code", {}, filled(formula, values)),
        make("p", {}, why),
        ...this.#body(arrays, name === "softmax"),
      ),
    );
  }

  /** What each key gets as a table, and vectors of the query before and after it. @param {StepArray[]} arrays @param {boolean} bars */
  #body(arrays, bars) {
    const { numbers } = this.steps;
    const perKey = arrays.filter(([, , axes]) => axes.includes("key"));
    const columns = perKey.flatMap((array) => [this.#column(array), ...this.#strips(array)]);
    const table = this.#table(columns, bars);
    return arrays.flatMap((array) => {
      if (array === perKey[0]) return array[0] === "k" ? [table, this.#products()] : [table];
      return perKey.includes(array) ? [] : [this.#vector(array[1], numbers[array[0]], this.steps.query)];
    });
  }

  /** A number, or the first numbers of a vector, for each key. @param {StepArray} array @returns {Column} */
  #column([id, name, axes]) {
    const { steps, side } = this;
    const summed = side.data.steps?.summed.includes(name);
    if (!axes.endsWith("dim")) {
      const values = steps.numbers[id];
      const of = id === "weights" ? said : number;
      const cell = (/** @type {number} */ key) => (values ? of(values[key]) : steps.visible[key] ? "yes" : "no");
      return { title: name, cell, sum: summed ? of(total(values)) : "" };
    }
    const vector = steps.vectors[id];
    const width = vector(0).length;
    const first = width > FIRST ? IN_COLUMN : width;
    const of = name.includes("×") ? "" : ` of ${width}`;
    return {
      title: first < width ? `${name} (first ${first}${of})` : name,
      cell: (key) => numbers(vector(key), first),
      sum: summed ? numbers(steps.numbers.output, first) : "",
      vector: true,
    };
  }

  /**
   * Vectors of each key as strips of colours: k and its products with q, whose sum is the score; what each v adds.
   *
   * @param {StepArray} array @returns {Column[]}
   */
  #strips([id]) {
    const { vectors, numbers: of } = this.steps;
    return (STRIPS[id] ?? []).map(([one, title]) => {
      const rows = new Map(this.keys.map((key) => [key, vectors[one](key)]));
      const most = Math.max(...[...rows.values()].flatMap((row) => [...row.map(Math.abs)])) || 1;
      /** @param {number} key @returns {(at: number) => [string, string][]} */
      const about = (key) => (at) => [
        ...(one === "products" ? /** @type {[string, string][]} */ ([["q", number(of.q[at])], ["k", number(vectors.k(key)[at])]]) : []),
        [title, number(vectors[one](key)[at])],
      ];
      const drawn = (/** @type {number} */ key) => strip(`${title} of ${named(this.units, key)}`, rows.get(key) ?? vectors[one](key), most, about(key));
      return { title: `${title} by dimension`, cell: () => "", strip: drawn };
    });
  }

  /** Which dimensions the score of the chosen key, else of the strongest, is made of. */
  #products() {
    const { weights, visible, vectors, numbers: of } = this.steps;
    const best = weights.reduce((most, weight, key) => (visible[key] && weight > weights[most] ? key : most), 0);
    const key = this.key ?? best;
    const says = `${named(this.units, key)}: q · k = ${number(of.raw[key])}, most of it from ${foremost(vectors.products(key))}.`;
    return make("p", { "data-role": "products" }, says);
  }

  /**
   * A vector of the query: its strip, first numbers, how many more, length.
   *
   * @param {string} name @param {Float64Array} values @param {number} token
   */
  #vector(name, values, token) {
    const rest = values.length - FIRST;
    const cells = [name, numbers(values, FIRST), rest > 0 ? `… ${rest} more` : "", `length ${number(length(values))}`];
    const of = `${name} of token ${named(this.units, token)}`;
    const most = values.reduce((far, value) => Math.max(far, Math.abs(value)), 0) || 1;
    return make(
      "p",
      { class: "vector", "data-vector": name },
      `${of}:  `,
      make("b", {}, cells[1]),
      ` ${cells[2]}   ${cells[3]}  `,
      strip(of, values, most, (at) => [[name, number(values[at])]]),
    );
  }

  /** A row for each key that is shown; what is not is counted. @param {Column[]} columns @param {boolean} [bars] */
  #table(columns, bars = false) {
    const { units, steps, keys, key: chosen } = this;
    const head = make(
      "tr",
      {},
      make("th", { scope: "col" }, "key"),
      make("th", { scope: "col", class: "words" }, "token"),
      ...columns.map(({ title }) => make("th", { scope: "col" }, title)),
      bars && make("th", { scope: "col" }, spoken("weight as a bar")),
    );
    const rows = keys.map((key) => {
      const bar = make("i", { class: "share" });
      bar.style.setProperty("--share", String(steps.weights[key]));
      const classes = [!steps.visible[key] && "unseen", key === chosen && "chosen"].filter(Boolean).join(" ");
      return make(
        "tr",
        { class: classes, "data-token": key, "data-axis": "key" },
        make("td", {}, String(key)),
        make("td", { class: "words" }, make("span", { class: "token key" }, short(units.label[key], 16))),
        ...columns.map(({ cell, vector, strip: drawn }) => make("td", { class: vector ? "vector" : "" }, drawn ? drawn(key) : cell(key))),
        bars && make("td", { class: "share-cell" }, bar),
      );
    });
    const rest = steps.weights.length - keys.length;
    if (rest)
      rows.push(
        make(
          "tr",
          { class: "unseen" },
          make("td", {}),
          make("td", { class: "words", colspan: columns.length + (bars ? 2 : 1) }, this.#rest(rest)),
        ),
      );
    if (columns.some(({ sum }) => sum))
      rows.push(
        make(
          "tr",
          { class: "sum" },
          make("td", {}),
          make("td", { class: "words" }, "sum"),
          ...columns.map(({ sum, vector }) => make("td", { class: vector ? "vector" : "" }, sum ?? "")),
          bars && make("td", {}),
        ),
      );
    return make(
      "div",
      { class: "table-scroll", tabindex: 0, role: "group", "aria-label": columns.map(({ title }) => title).join(", ") },
      make("table", { class: "numbers" }, make("thead", {}, head), make("tbody", {}, ...rows)),
    );
  }

  /** @param {number} rest @returns {string} */
  #rest(rest) {
    const shown = new Set(this.keys);
    const hidden = this.steps.visible.filter((visible, key) => !visible && !shown.has(key)).length;
    return `… ${rest} more${hidden === rest ? ", hidden" : hidden ? `, ${hidden} of them hidden` : ""}`;
  }

  /** In short, and whether these weights are the map's. @param {import("../data.js").WeightMap|null} map */
  summary(map) {
    const { weights, query } = this.steps;
    const { label } = this.units;
    const best = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 3);
    const most = best
      .filter((key) => weights[key] >= 0.01)
      .map((key) => `${short(label[key])} (${said(weights[key])})`);
    const says = `In short: ${short(label[query])} gives most weight to ${most.join(", ")}.`;
    return make("div", { class: "step" }, make("p", {}, says), ...(map?.bin === 1 ? this.#held(map) : []));
  }

  /** The weights beside the map's, and the chosen key's. @param {import("../data.js").WeightMap} map */
  #held(map) {
    const { key, units } = this;
    const { weights, query, visible } = this.steps;
    const half = map.step / 2;
    const far = weights.reduce((worst, weight, one) => Math.max(worst, Math.abs(weight - map.at(query, one))), 0);
    const equal = far <= half + TOLERANCE;
    const check = { class: equal ? "holds" : "fails", "data-role": "check" };
    const how = `largest difference ${number(far)}, half a step of the map ${number(half)}`;
    const parts = [make("p", check, `${equal ? "✓ equal" : "✗ not equal"} to the map's weights: ${how}`)];
    if (key === null || !visible[key]) return parts;
    const both = `computed ${said(weights[key])}, in the map ${said(map.at(query, key), map.step)}`;
    return [...parts, make("p", {}, `${named(units, key)}: ${both}`)];
  }
}

/** Words with numbers at their places, as in `sees {seen}`. @param {string} text @param {Record<string, unknown>} values */
const filled = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => String(values[name]));

const TOLERANCE = 1e-5; // the map's weights come from a float32 softmax

/**
 * The keys that are shown, in order: all, or the strongest, a hidden one and the chosen one.
 *
 * @param {Steps} steps @param {number} most @param {number|null} key
 */
function kept({ weights, visible }, most, key) {
  const all = [...weights.keys()];
  if (all.length <= Math.max(MOST_KEYS, most)) return all;
  const strongest = all
    .filter((one) => visible[one])
    .sort((a, b) => weights[b] - weights[a])
    .slice(0, most);
  const hidden = all.find((one) => !visible[one]);
  return [...new Set([...strongest, ...(hidden === undefined ? [] : [hidden]), ...(key === null ? [] : [key])])].sort(
    (a, b) => a - b,
  );
}
